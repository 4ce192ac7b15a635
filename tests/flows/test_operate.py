"""What keeps runs in order on a server: automations, draining, pages of failed runs, the check of it all."""

import asyncio
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import uuid
from datetime import UTC, datetime, timedelta
from pathlib import Path

import psutil
import pytest
import yaml
from prefect import flow, task
from prefect.automations import AutomationCore
from prefect.blocks.notifications import SlackWebhook
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterFlowRunId, ArtifactFilterKey
from prefect.client.schemas.objects import FlowRun
from prefect.events.actions import SendNotification
from prefect.server.database import provide_database_interface
from prefect.settings import (
    PREFECT_HOME,
    PREFECT_SERVER_API_HOST,
    PREFECT_SERVER_API_PORT,
    PREFECT_SERVER_DATABASE_CONNECTION_URL,
    temporary_settings,
)
from prefect.states import Cancelled as CancelledState
from prefect.states import Crashed, Pending, Running

from flows import automations, drain, hooks, server_settings, server_up
from flows.deploy import deploy_recipes, ensure_pool
from flows.deployments import HEARTBEAT_SECONDS, Timing, job_variables
from flows.heartbeats import give_time_to_report
from flows.pipeline import pipeline
from flows.server_check import find_problems
from flows.server_up import Child, Setup, serve, start_alone
from mca_lib.errors import ConfigError, DataError
from tests.flows.finished import Run

ROOT = Path(__file__).parents[2]


# -- automations


def test_automations_are_made_once_and_changed_only_when_they_differ(
    client: SyncPrefectClient, monkeypatch: pytest.MonkeyPatch
):
    automations.install(client, "http://127.0.0.1:9/first")
    before = {a.name: a for a in client.read_automations()}
    with monkeypatch.context() as patch:
        patch.setattr(SyncPrefectClient, "update_automation", None)  # would forget which runs are watched
        automations.install(client, "http://127.0.0.1:9/second")
    after = {a.name: a for a in client.read_automations()}
    assert {name: a.id for name, a in after.items()} == {name: a.id for name, a in before.items()}
    (action,) = after[automations.ALERT].actions
    assert isinstance(action, SendNotification)
    secrets = client.read_block_document(action.block_document_id, include_secrets=True).data["secrets"]
    assert secrets == {"webhook": "http://127.0.0.1:9/second"}
    assert "second" not in json.dumps(client.read_block_document(action.block_document_id, include_secrets=False).data)
    SlackWebhook(url="http://127.0.0.1:9/ops").save("ops", overwrite=True)
    automations.install(client, "slack-webhook/ops")
    (alert,) = client.read_automations_by_name(automations.ALERT)
    assert alert.id == before[automations.ALERT].id
    assert alert.description.endswith("slack-webhook/ops.")
    with pytest.raises(ConfigError, match=r"^--notify slack-webhook/absent: the server has no block"):
        automations.install(client, "slack-webhook/absent")


def test_healthy_runs_have_three_heartbeats_before_they_are_called_dead(finished: Run, monkeypatch: pytest.MonkeyPatch):
    assert automations.zombie_within().total_seconds() >= 3 * HEARTBEAT_SECONDS
    assert server_settings.CLIENT["PREFECT_FLOWS_HEARTBEAT_FREQUENCY"] == str(HEARTBEAT_SECONDS)
    monkeypatch.setenv("PREFECT_FLOWS_HEARTBEAT_FREQUENCY", "30")
    assert automations.zombie_within().total_seconds() == 120
    assert job_variables(finished.config)["env"]["PREFECT_FLOWS_HEARTBEAT_FREQUENCY"] == "30"
    monkeypatch.setenv("PREFECT_FLOWS_HEARTBEAT_FREQUENCY", "10")
    with pytest.raises(ConfigError, match="PREFECT_FLOWS_HEARTBEAT_FREQUENCY: '10'"):
        automations.zombie_within()


def test_a_server_that_comes_back_gives_runs_time_to_report(client: SyncPrefectClient):
    """Without, the first look at the clock would call every run dead that could not reach the server meanwhile."""
    zombies = automations.zombies()
    name = f"heartbeats {uuid.uuid4().hex[:6]}"
    wanted = AutomationCore(name=name, trigger=zombies.trigger, actions=zombies.actions)
    automation = client.create_automation(wanted)
    past = datetime.now(UTC) - timedelta(minutes=10)

    async def scenario() -> datetime:
        db = provide_database_interface()
        bucket = db.AutomationBucket(
            automation_id=automation, trigger_id=uuid.uuid4(), bucketing_key=["run"], start=past, end=past, count=0
        )
        async with db.session_context(begin_transaction=True) as session:
            session.add(bucket)
        assert await give_time_to_report("another automation", timedelta(minutes=4)) == 0
        assert await give_time_to_report(name, timedelta(minutes=4)) == 1
        async with db.session_context() as session:
            return (await session.get(db.AutomationBucket, bucket.id)).end

    assert asyncio.run(scenario()) > datetime.now(UTC) + timedelta(minutes=3)


# -- draining


def test_draining_pauses_the_pool_and_cancels_what_outlasts_the_patience(
    client: SyncPrefectClient, run: Run, write_recipe, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(drain, "_LOOK_SECONDS", 0.01)
    pool = f"pool-{uuid.uuid4().hex[:6]}"
    ensure_pool(client, pool)
    deploy_recipes([write_recipe(run.config)], ["name=drained"], Timing(), pool=pool)
    deployment = client.read_deployment_by_name("mcaflow/drained")
    started = client.create_flow_run_from_deployment(deployment.id)
    for state in (Pending(), Running()):
        client.set_flow_run_state(started.id, state, force=True)

    def cancel(client: SyncPrefectClient, runs: list[FlowRun]) -> None:
        give_up(client, runs)
        assert [client.read_flow_run(r.id).state.is_cancelling() for r in runs] == [True]
        client.set_flow_run_state(started.id, CancelledState(), force=True)  # the worker's part

    give_up = drain.cancel
    monkeypatch.setattr(drain, "cancel", cancel)
    drain.pause(client, pool, paused=True)
    drain.wait(client, pool, lambda: True)
    assert client.read_work_pool(pool).is_paused
    assert client.read_flow_run(started.id).state.is_cancelled()
    with pytest.raises(ConfigError, match="--pool absent: the server has no such work pool"):
        drain.drain_pool("absent", None)


# -- pages of failed runs


def page_of(client: SyncPrefectClient, run_id: uuid.UUID) -> str:
    of_run = ArtifactFilter(flow_run_id=ArtifactFilterFlowRunId(any_=[run_id]), key=ArtifactFilterKey(any_=["failure"]))
    (page,) = client.read_artifacts(artifact_filter=of_run)
    return page.data


def test_a_failed_run_leaves_a_page_with_the_reason_and_the_way_on(client: SyncPrefectClient, run: Run):
    broken = run.folder / "assets/data.json"
    broken.write_text(json.dumps([{"instruction": 3}]))
    state = pipeline(run.config, return_state=True)
    assert state.is_failed()
    page = page_of(client, state.state_details.flow_run_id)
    assert page.startswith("# test · ")
    assert "    1 of 1 rows are unusable" in page
    assert page.rstrip().endswith("the same mcaflow run …")


def test_the_page_names_the_stage_and_shows_no_secret(client: SyncPrefectClient, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HF_TOKEN", "hf_0123456789abcdef")

    @task(task_run_name="train", persist_result=False)
    def train() -> None:
        raise DataError("refused: hf_0123456789abcdef\n```\nlast line")

    @flow(**hooks.HOOKS)
    def failing() -> None:
        train()

    state = failing(return_state=True)
    page = page_of(client, state.state_details.flow_run_id)
    assert "Stage: **train** (Failed)" in page
    assert "refused: <HF_TOKEN>\n    ```\n    last line" in page


def test_a_crash_ends_what_carries_the_mark_of_the_run(client: SyncPrefectClient):
    """The hook runs in the worker; the orphan is in a session of its own."""

    @flow
    def done() -> None: ...

    state = done(return_state=True)
    flow_run = client.read_flow_run(state.state_details.flow_run_id)
    env = os.environ | {hooks.RUN_ID: str(flow_run.id)}
    orphan = subprocess.Popen(["sleep", "600"], env=env, start_new_session=True)
    hooks.on_crashed(flow=done, flow_run=flow_run, state=Crashed(message="killed"))
    orphan.wait(10)  # raises when it lives
    assert not psutil.pid_exists(orphan.pid)
    assert "killed" in page_of(client, flow_run.id)


# -- settings and their check


def test_a_server_that_others_reach_needs_a_password(monkeypatch: pytest.MonkeyPatch):
    for name in [name for name in os.environ if name.startswith("PREFECT")]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(os, "environ", dict(os.environ) | {"PREFECT_API_URL": "http://another/api"})
    assert server_settings.apply(4399) == "http://127.0.0.1:4399/api"
    assert os.environ["PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE"] == server_settings.FILESYSTEM_LEASES
    os.environ["PREFECT_SERVER_API_HOST"] = "0.0.0.0"
    with pytest.raises(ConfigError, match=r"^PREFECT_SERVER_API_HOST: 0\.0\.0\.0 can be reached by others"):
        server_settings.apply(4399)
    os.environ["PREFECT_SERVER_API_AUTH_STRING"] = "ops:secret"
    server_settings.apply(4399)
    assert os.environ["PREFECT_API_AUTH_STRING"] == "ops:secret"


def test_check_names_what_a_bare_server_lacks(client: SyncPrefectClient, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PREFECT_API_KEY", "key")
    found = [problem.partition(":")[0] for problem in find_problems(client, "absent")]
    assert found[:4] == [
        "PREFECT_SERVER_API_AUTH_STRING",
        "PREFECT_SERVER_API_CSRF_PROTECTION_ENABLED",
        "PREFECT_SERVER_API_CORS_ALLOWED_ORIGINS",
        "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE",
    ]
    assert "PREFECT_API_KEY" in found
    assert "work pool absent" in found


def test_the_files_for_systemd_and_compose_have_the_same_settings(finished: Run):
    compose = yaml.safe_load((ROOT / "deployments/compose.yaml").read_text())["services"]
    worker = compose["worker"]["environment"]
    assert server_settings.CLIENT.items() <= worker.items()
    assert compose["server"]["ports"] == ["127.0.0.1:4200:4200"]
    assert "ports" not in compose["postgres"]
    systemd = (ROOT / "deployments/systemd/mcaflow.env.example").read_text().splitlines()
    expected = {f"{name}={value}" for name, value in server_settings.CLIENT.items() if name != "DO_NOT_TRACK"}
    assert expected <= set(systemd)
    assert server_settings.CLIENT.items() <= job_variables(finished.config)["env"].items()


def test_systemd_accepts_the_units(tmp_path: Path):
    if shutil.which("systemd-analyze") is None:
        pytest.skip("no systemd here")
    for unit in (ROOT / "deployments/systemd").glob("*.service"):
        # Only the programs are elsewhere.
        text = re.sub(r"/opt/mcaflow/\.venv/bin/\w+", "/bin/true", unit.read_text())
        (tmp_path / unit.name).write_text(text)
    units = [str(path) for path in tmp_path.iterdir()]
    assert len(units) == 2
    done = subprocess.run(["systemd-analyze", "verify", *units], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("command", ["up", "start"])
def test_a_second_server_on_one_database_or_port_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command):
    """The holder is another process, killed in the end."""
    hold = "import sys; from pathlib import Path; from flows.server_lock import _hold; _hold(Path(sys.argv[1]), 14261)"
    holder = subprocess.Popen(
        [sys.executable, "-c", f"{hold}; print('held', flush=True); input()", str(tmp_path)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert holder.stdout.readline() == b"held\n"
    monkeypatch.setattr(os, "environ", dict(os.environ))
    settings = {PREFECT_HOME: tmp_path, PREFECT_SERVER_DATABASE_CONNECTION_URL: f"sqlite+aiosqlite:///{tmp_path}/a.db"}
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        settings |= {PREFECT_SERVER_API_HOST: "127.0.0.1", PREFECT_SERVER_API_PORT: port}
        start = {"up": lambda: serve(Setup("", "pool", False, 0, None)), "start": start_alone}[command]
        with temporary_settings(settings):
            with pytest.raises(ConfigError, match=rf"^PREFECT_HOME: .*process {holder.pid}, port 14261"):
                start()
            holder.kill()
            holder.wait()
            with pytest.raises(ConfigError, match=f"^--port {port}: .* listens there already"):
                start()
        other = {PREFECT_SERVER_DATABASE_CONNECTION_URL: "postgresql+asyncpg://u:p@h/d"}
        with temporary_settings(settings | other), pytest.raises(ConfigError, match=r"^--port"):
            start()  # the lock is held, by this process


def test_children_of_the_server_command_end_with_all_that_they_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    marker = tmp_path / "pid"
    script = f"setsid sleep 600 & echo $! > {marker}; trap '' TERM; wait"
    child = Child("child", ["sh", "-c", script])
    child.start()
    while not (marker.exists() and marker.read_text()):
        assert not child.has_ended()
    monkeypatch.setattr(server_up, "_STOP_SECONDS", 0.1)
    child.stop()
    assert child.has_ended()
    assert not Path(f"/proc/{marker.read_text().strip()}").exists()
