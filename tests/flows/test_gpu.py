"""Slots of the server's GPU limit: taken while *train* computes, given back whatever becomes of the run."""

import threading
import uuid
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from prefect import flow
from prefect.client.orchestration import SyncPrefectClient

from flows import gpu
from mca_lib.errors import ConfigError
from tasks.errors import Cancelled
from tasks.report import LogReporter
from tasks.stage import ensure
from tasks.store import ArtifactStore
from tasks.training_config import LauncherConfig
from tests.tasks.toys import Letter


@pytest.fixture
def two_gpus(client: SyncPrefectClient) -> Iterator[None]:
    client.upsert_global_concurrency_limit_by_name(gpu.LIMIT, 2)
    yield
    client.delete_global_concurrency_limit_by_name(gpu.LIMIT)


def taken(client: SyncPrefectClient) -> int:
    return client.read_global_concurrency_limit_by_name(gpu.LIMIT).active_slots


def test_ranks_hold_a_slot_each_while_they_compute_and_the_next_run_can_be_cancelled(
    client: SyncPrefectClient, two_gpus: None, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(gpu, "_LOOK_SECONDS", 0.01)
    looks = []

    def check() -> None:
        looks.append(1)
        if len(looks) == 3:
            raise Cancelled

    occupy = gpu.occupying(LauncherConfig(nproc_per_node=2), LogReporter("train"))
    with occupy(lambda: None):
        assert taken(client) == 2
        with pytest.raises(Cancelled), occupy(check):
            pytest.fail("two runs on the same GPUs")
    assert taken(client) == 0


def test_slots_of_a_dead_run_are_free_at_once(client: SyncPrefectClient, two_gpus: None):
    occupy = gpu.occupying(LauncherConfig(nproc_per_node=2), LogReporter("train"))

    kept = occupy(lambda: None)

    @flow
    def killed() -> None:
        kept.__enter__()  # and never left, as by a SIGKILL

    first = killed(return_state=True).state_details.flow_run_id
    assert taken(client) == 2
    gpu.release_left(first)
    assert taken(client) == 0
    gpu.release_left(first)
    assert taken(client) == 0


def test_a_server_that_is_away_at_the_end_costs_a_warning_not_the_training(
    client: SyncPrefectClient, two_gpus: None, monkeypatch: pytest.MonkeyPatch
):
    def away(self: SyncPrefectClient, lease: uuid.UUID) -> None:
        raise httpx.ConnectError("nobody answers")

    warnings = []
    monkeypatch.setattr(SyncPrefectClient, "release_concurrency_slots_with_lease", away)
    monkeypatch.setattr(LogReporter, "warning", lambda self, text: warnings.append(text))
    with gpu.occupying(LauncherConfig(nproc_per_node=2), LogReporter("train"))(lambda: None):
        assert taken(client) == 2
    assert warnings == [
        "the slots of mcaflow-gpu are free when their lease ends, as the server is away: nobody answers"
    ]


def test_a_lease_is_renewed_until_the_server_has_forgotten_it(
    client: SyncPrefectClient, two_gpus: None, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(gpu, "_RENEW_SECONDS", 0.01)
    renewed, warned, leases = threading.Semaphore(0), threading.Event(), set()
    renew = SyncPrefectClient.renew_concurrency_lease

    def count(self: SyncPrefectClient, lease: uuid.UUID, seconds: float) -> None:
        leases.add(lease)
        renew(self, lease, seconds)
        renewed.release()

    monkeypatch.setattr(SyncPrefectClient, "renew_concurrency_lease", count)
    report = LogReporter("train")
    monkeypatch.setattr(LogReporter, "warning", lambda self, text: warned.set())
    with gpu.occupying(LauncherConfig(nproc_per_node=1), report)(lambda: None):
        for _ in range(2):
            assert renewed.acquire(timeout=30)
        assert not warned.is_set()
        client.release_concurrency_slots_with_lease(*leases)
        assert warned.wait(30)


def test_what_the_store_has_needs_no_gpu(client: SyncPrefectClient, two_gpus: None, tmp_path: Path):
    seen = []
    store = ArtifactStore(tmp_path)
    occupy = gpu.occupying(LauncherConfig(nproc_per_node=2), LogReporter("train"))

    def spy(check):
        seen.append("asked")
        return occupy(check)

    assert not ensure(store, Letter("a"), occupy=spy).cached
    assert ensure(store, Letter("a"), occupy=spy).cached
    assert seen == ["asked"]
    assert taken(client) == 0


def test_more_ranks_than_slots_are_refused_and_other_launchers_do_not_ask(client: SyncPrefectClient, two_gpus: None):
    report = LogReporter("train")
    with (
        pytest.raises(ConfigError, match=r"^launcher\.nproc_per_node: 3 ranks, but .* has 2 slots"),
        gpu.occupying(LauncherConfig(nproc_per_node=3), report)(lambda: None),
    ):
        pass
    with gpu.occupying(LauncherConfig(kind="slurm", nproc_per_node=3), report)(lambda: None):
        assert taken(client) == 0
