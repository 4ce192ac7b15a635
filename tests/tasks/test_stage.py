"""`ensure` computes once, explains itself, and publishes whole artifacts or nothing; `probe` changes nothing."""

import os
import random
import signal
import threading
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import pytest

from mca_lib.errors import DataError
from tasks.cancel import cancel_all
from tasks.canonical import stage_key
from tasks.contract import key_payload
from tasks.errors import Cancelled, CanonicalError, LeaseLost, StageFailed, StoreError
from tasks.stage import FieldChange, Hit, Input, Miss, Produced, Stage, StageContext, ensure, probe
from tasks.store import ArtifactStore
from tests.tasks.toys import STARTED, Copy, Letter, start, start_letter, whole


@pytest.fixture
def store(tmp_path: Path) -> ArtifactStore:
    return ArtifactStore(tmp_path / "store")


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "log"
    path.touch()
    return path


def computations(log: Path) -> int:
    return len(log.read_text().splitlines())


def key_of(stage: Stage) -> str:
    return stage_key(key_payload(stage))


@dataclass(frozen=True)
class Trouble(Stage):
    """Calls `act` in the middle of its work."""

    name: ClassVar[str] = "trouble"
    version: ClassVar[int] = 1
    act: object

    def identity(self) -> dict:
        return {}

    def produce(self, ctx: StageContext) -> Produced:
        (ctx.staging / "half").write_text("half")
        (ctx.work / "checkpoint").write_text("precious")
        self.act(ctx)
        return Produced()


# -- hits and misses ---------------------------------------------------------------------------------------------


def test_second_ensure_is_a_hit(store: ArtifactStore, log: Path) -> None:
    first, second = ensure(store, Letter("a", log)), ensure(store, Letter("a", log))
    assert (first.cached, second.cached) == (False, True)
    assert (first.reason, second.reason) == ("never computed", "")
    assert second.artifact == first.artifact
    assert computations(log) == 1


def test_miss_names_the_fields_that_changed_against_the_nearest_record(store: ArtifactStore) -> None:
    letter = ensure(store, Letter("a")).artifact
    ensure(store, Copy(letter, "bold"))
    verdict = probe(store, Copy(letter, "thin"))
    assert verdict == Miss("identity.style changed", [FieldChange("identity.style", "bold", "thin")])
    other = ensure(store, Letter("b")).artifact
    verdict = probe(store, Copy(other, "bold"))
    assert verdict.changed == [FieldChange("inputs.letter", letter.digest, other.digest)]


def test_miss_names_a_field_that_is_new_and_a_raised_version(
    store: ArtifactStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    ensure(store, Letter("a"))
    monkeypatch.setattr(Letter, "identity", lambda self: {"text": "a", "files": 3, "tone": None})
    monkeypatch.setattr(Letter, "version", 2)
    assert probe(store, Letter("a")).changed == [
        FieldChange("version", 1, 2),
        FieldChange("identity.tone", None, None),
    ]


def test_probe_changes_nothing(store: ArtifactStore) -> None:
    artifact = ensure(store, Letter("a")).artifact
    (artifact.path / "folder0" / "0.txt").unlink()
    before = sorted(store.root.rglob("*"))
    assert isinstance(probe(store, Letter("a")), Miss)
    assert isinstance(probe(store, Letter("b")), Miss)
    assert sorted(store.root.rglob("*")) == before


def test_recomputed_content_that_is_the_same_invalidates_nothing(store: ArtifactStore, log: Path) -> None:
    first = ensure(store, Letter("a", log)).artifact
    ensure(store, Copy(first))
    again = ensure(store, Letter("a", log), refresh=True)
    assert not again.cached
    assert computations(log) == 2
    assert ensure(store, Copy(again.artifact)).cached


def test_stage_that_depends_on_a_part_is_blind_to_the_rest(store: ArtifactStore) -> None:
    few = ensure(store, Letter("a", files=3)).artifact
    many = ensure(store, Letter("a", files=4)).artifact
    assert few.digest != many.digest
    assert Input.of(few, "first").digest == Input.of(many, "first").digest


def test_refresh_with_other_content_replaces_the_artifact_and_keeps_the_old_one(
    store: ArtifactStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = ensure(store, Letter("a")).artifact
    monkeypatch.setattr(Letter, "identity", lambda self: {"text": "a", "files": 3})
    new = ensure(store, Letter("b"), refresh=True)
    assert new.artifact.key == old.key
    assert new.artifact.digest != old.digest
    assert probe(store, Letter("b")) == Hit(new.artifact)
    assert len(list((store.root / ".quarantine").glob("*.reason.txt"))) == 1


def test_identity_without_a_canonical_form_is_refused(store: ArtifactStore) -> None:
    with pytest.raises(CanonicalError, match=r"^letter\.identity\.text: .*nan"):
        ensure(store, Letter(float("nan")))


def test_damaged_input_is_refused_and_named(store: ArtifactStore) -> None:
    letter = ensure(store, Letter("a")).artifact
    os.truncate(letter.path / "folder0" / "0.txt", 3)
    with pytest.raises(StoreError, match=r"copy: input letter is damaged: letter/\w+/folder0/0.txt has 3 bytes"):
        ensure(store, Copy(letter))
    assert store.ls("copy") == []
    repaired = ensure(store, Letter("a")).artifact
    assert not ensure(store, Copy(repaired)).cached


# -- failures ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "error", [StageFailed("x"), DataError("x"), RuntimeError("x"), KeyboardInterrupt(), Cancelled()]
)
def test_failed_stage_publishes_nothing_and_keeps_its_work(store: ArtifactStore, error: BaseException) -> None:
    def fail(ctx: StageContext) -> None:
        raise error

    with pytest.raises(type(error)):
        ensure(store, Trouble(fail))
    assert store.ls() == []
    assert list(store.staging.iterdir()) == []
    assert list(store.leases.iterdir()) == []
    key = key_of(Trouble(None))
    assert (store.work("trouble", key) / "checkpoint").read_text() == "precious"

    def resume(ctx: StageContext) -> None:
        (ctx.staging / "seen").write_text((ctx.work / "checkpoint").read_text())

    assert (ensure(store, Trouble(resume)).artifact.path / "seen").read_text() == "precious"
    assert not store.work("trouble", key).exists()


def test_run_that_was_replaced_publishes_nothing(store: ArtifactStore) -> None:
    def lose(ctx: StageContext) -> None:
        (lease,) = store.leases.iterdir()
        lease.rename(lease.with_suffix(".2"))

    with pytest.raises(LeaseLost):
        ensure(store, Trouble(lose))
    assert store.ls() == []


def test_cancelled_run_publishes_nothing(store: ArtifactStore) -> None:
    with pytest.raises(Cancelled):
        ensure(store, Trouble(lambda ctx: cancel_all()))
    assert store.ls() == []
    assert not ensure(store, Trouble(lambda ctx: None)).cached


def test_symbolic_link_in_the_output_is_refused(store: ArtifactStore) -> None:
    with pytest.raises(StageFailed, match="link is a symbolic link"):
        ensure(store, Trouble(lambda ctx: (ctx.staging / "link").symlink_to("/etc/passwd")))


def test_secret_in_the_statistics_is_not_recorded(store: ArtifactStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_0123456789abcdef")

    class Leaky(Letter):
        def produce(self, ctx: StageContext) -> Produced:
            return replace(super().produce(ctx), stats={"header": "Bearer hf_0123456789abcdef"})

    with pytest.raises(StageFailed, match="value of HF_TOKEN") as caught:
        ensure(store, Leaky("a"))
    assert "0123456789" not in str(caught.value)


# -- several processes -------------------------------------------------------------------------------------------


def test_two_runs_at_once_compute_once(store: ArtifactStore, log: Path) -> None:
    runs = [start_letter(store, Letter("a", log, files=200)) for _ in range(3)]
    assert sorted(run.communicate()[0] for run in runs) == ["False\n", "True\n", "True\n"]
    assert computations(log) == 1


def test_runs_that_do_not_see_each_others_lease_still_agree(store: ArtifactStore, log: Path) -> None:
    # A shared file system on which leases do not work: each run has a lease folder of its own.
    barrier = threading.Barrier(2)
    outcomes = []

    class Blind(ArtifactStore):
        @property
        def leases(self) -> Path:
            return self.root / f".leases-{threading.get_ident()}"

    class Together(Letter):
        def produce(self, ctx: StageContext) -> Produced:
            barrier.wait(60)
            produced = super().produce(ctx)
            barrier.wait(60)
            return produced

    def run() -> None:
        outcomes.append(ensure(Blind(store.root), Together("a", log)))

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert computations(log) == 2
    assert outcomes[0].artifact.record == outcomes[1].artifact.record
    assert whole(store)


def test_killed_run_is_taken_over_at_once_and_its_staging_goes(store: ArtifactStore, log: Path) -> None:
    killed = start_letter(store, Letter("a", log, hold=True))
    assert killed.stdout.readline() == f"{STARTED}\n"
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    assert len(list(store.staging.iterdir())) == 1
    outcome = ensure(store, Letter("b"))  # another key, the same broom
    assert list(store.staging.iterdir()) == []
    assert not outcome.cached
    assert not ensure(store, Letter("a", log)).cached
    assert computations(log) == 2


def test_work_folder_of_a_run_that_was_killed_after_publishing_goes_with_the_next_computation(
    store: ArtifactStore,
) -> None:
    artifact = ensure(store, Letter("a")).artifact
    done, open_end = store.work("letter", artifact.key), store.work("letter", "0" * 32)
    done.mkdir()
    open_end.mkdir()
    ensure(store, Letter("b"))
    assert not done.exists()
    assert open_end.exists()


def test_kill_at_any_moment_leaves_no_half_artifact(store: ArtifactStore) -> None:
    code = (
        "store = ArtifactStore(sys.argv[1])\n"
        "print('ready', flush=True)\n"
        "for i in range(1000):\n"
        "    ensure(store, Letter(f'{sys.argv[2]} {i}', files=4))\n"
        "    print(i, flush=True)\n"
    )
    chance = random.Random(7)
    for attempt in range(6):
        run = start(code, store.root, attempt)
        for _ in range(chance.randrange(2, 6)):
            run.stdout.readline()
        # Not a wait for anything: the moment of the kill is what varies.
        threading.Event().wait(chance.uniform(0, 0.02))
        run.send_signal(signal.SIGKILL)
        run.communicate()
        assert whole(store)
        assert len(store.ls()) >= attempt
    ensure(store, Letter("last"))
    assert list(store.staging.iterdir()) == []
