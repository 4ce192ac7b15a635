"""`mcaflow deploy`: what a server has afterwards, that prefect.yaml says the same; a watch starts what has changed."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect.states import Completed, Failed

from flows import drain
from flows.cli import app
from flows.deploy import deploy_recipes
from flows.deployments import Timing, portable
from flows.evaluation import require_trained
from flows.plan import make_plan
from flows.recipe import PipelineConfig
from flows.watch import look
from mca_lib.errors import ConfigError
from tasks.store import ArtifactStore
from tests.flows.finished import Run

ROOT = Path(__file__).parents[2]
ALL = Timing(cron="0 3 * * *", watch_seconds=900, evaluate_only=True)
NAMES = ("mcaflow/demo", "mcaflow/demo-scheduled", "mcaflow-evaluate/demo", "mcaflow-watch/demo")


@pytest.fixture
def client(prefect_server: None) -> SyncPrefectClient:
    with get_client(sync_client=True) as client:
        yield client


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The demonstration's recipe, beside files that are named in it by relative paths."""
    content = yaml.safe_load((ROOT / "deployments/recipes/demo.yaml").read_text())
    (tmp_path / ".mcaflow/demo").mkdir(parents=True)
    (tmp_path / ".mcaflow/demo/data.json").write_text(json.dumps([{"instruction": "a", "output": "b"}]))
    content["model"]["source"] = "huggingface"
    content["model"]["name_or_path"] = "org/model"
    path = tmp_path / "demo.yaml"
    path.write_text(yaml.safe_dump(content))
    monkeypatch.chdir(tmp_path)
    return path


def registered(client: SyncPrefectClient) -> dict[str, Any]:
    """What the server has of the recipe demo, without ids and times."""
    return {name: _facts(client, name) for name in NAMES}


def _facts(client: SyncPrefectClient, name: str) -> dict[str, Any]:
    found = client.read_deployment_by_name(name)
    limit, options = found.global_concurrency_limit, found.concurrency_options
    return {
        "id": found.id,
        "entrypoint": found.entrypoint,
        "pull": found.pull_steps or [],
        "path": found.path,
        "pool": found.work_pool_name,
        "parameters": found.parameters,
        "job_variables": found.job_variables,
        "tags": found.tags,
        "description": found.description,
        "limit": limit and (limit.limit, options.collision_strategy.value),
        "schedules": [
            (s.slug, s.active, s.schedule.model_dump(mode="json", exclude={"anchor_date"})) for s in found.schedules
        ],
    }


def test_deploy_is_idempotent_and_takes_back_what_is_not_asked_for(client: SyncPrefectClient, recipe: Path):
    deploy_recipes([recipe], [], ALL)
    first = registered(client)
    deploy_recipes([recipe], [], ALL)
    assert registered(client) == first
    scheduled = first["mcaflow/demo-scheduled"]
    assert scheduled["limit"] == (1, "CANCEL_NEW")
    assert scheduled["schedules"] == [("cron", True, {"cron": "0 3 * * *", "timezone": "UTC", "day_or": True})]
    assert first["mcaflow/demo"]["limit"] is None
    assert first["mcaflow-watch/demo"]["schedules"][0][2]["interval"] == 900
    assert scheduled["parameters"]["config"]["store"]["path"] == str(recipe.parent / ".mcaflow/store")

    deploy_recipes([recipe], [], Timing(cron="5 4 * * *", timezone="Europe/Berlin", overlap="queue"))
    changed = registered(client)
    assert changed["mcaflow/demo-scheduled"]["id"] == scheduled["id"]
    assert changed["mcaflow/demo-scheduled"]["limit"] == (1, "ENQUEUE")
    assert [s[2]["cron"] for s in changed["mcaflow/demo-scheduled"]["schedules"]] == ["5 4 * * *"]
    assert changed["mcaflow-watch/demo"]["schedules"] == []

    deploy_recipes([recipe], [], Timing())
    assert all(not facts["schedules"] for facts in registered(client).values())


def test_a_bad_recipe_or_schedule_registers_nothing(client: SyncPrefectClient, recipe: Path, tmp_path: Path):
    other = tmp_path / "other.yaml"
    other.write_text(recipe.read_text().replace("name: demo", "name: unregistered"))
    with pytest.raises(ConfigError, match=r"training\.max_steps"):
        deploy_recipes([other, recipe], ["training.max_steps=0"], Timing())
    with pytest.raises(ConfigError, match=r"--cron 'now'.*[Ii]nvalid cron"):
        deploy_recipes([other], [], Timing(cron="now"))
    with pytest.raises(ConfigError, match=r"^--watch: 15 seconds; .* a number alone is of seconds: 15m"):
        deploy_recipes([other], [], Timing(watch_seconds=15))
    with pytest.raises(ConfigError, match="named 'demo' too"):
        deploy_recipes([recipe, recipe], [], Timing())
    assert not any(found.name == "unregistered" for found in client.read_deployments())


@pytest.mark.parametrize("option", [["--timezone", "Europe/Berlin"], ["--overlap", "queue"]])
def test_options_of_a_clock_that_is_not_there_are_refused(option: list[str]):
    with pytest.raises(ConfigError, match=f"^{' '.join(option)}: without --cron it has no effect"):
        app(["deploy", "recipe.yaml", *option], standalone_mode=False)


def test_deploy_says_that_nobody_runs_what_the_pool_holds(client: SyncPrefectClient, recipe: Path, capsys):
    deploy_recipes([recipe], [], Timing(), pool="unattended")
    assert (
        capsys.readouterr()
        .out.splitlines()[-1]
        .startswith("work pool unattended: no worker is online; prefect worker start --pool unattended; ")
    )
    drain.pause(client, "unattended", paused=True)
    deploy_recipes([recipe], [], Timing(), pool="unattended")
    assert "work pool unattended: paused; prefect work-pool resume unattended; " in capsys.readouterr().out
    drain.pause(client, "unattended", paused=False)
    client.request("POST", "/work_pools/unattended/workers/heartbeat", json={"name": "worker"})
    deploy_recipes([recipe], [], Timing(), pool="unattended")
    assert "work pool" not in capsys.readouterr().out


def test_deploy_without_a_server_says_what_to_start(recipe: Path):
    with (
        temporary_settings({PREFECT_API_URL: "http://127.0.0.1:9/api"}),
        pytest.raises(
            ConfigError, match=r"^PREFECT_API_URL: no Prefect server answers at http://127.0.0.1:9/api .* server up\)$"
        ),
    ):
        deploy_recipes([recipe], [], Timing())
    with temporary_settings({PREFECT_API_URL: None}), pytest.raises(ConfigError, match=r"^PREFECT_API_URL: not set"):
        deploy_recipes([recipe], [], Timing())


def test_prefect_yaml_says_what_the_command_does(client: SyncPrefectClient, tmp_path: Path, monkeypatch):
    """As `prefect deploy --all` reads it, in the folder that the recipe's paths are relative to."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".mcaflow/demo").mkdir(parents=True)
    (tmp_path / ".mcaflow/demo/data.json").write_text(json.dumps([{"instruction": "a", "output": "b"}]))
    monkeypatch.setattr("flows.deploy.check_recipe", lambda config: None)  # there is no model here
    monkeypatch.setattr("flows.deployments.Path.is_dir", lambda path: True)
    deploy_recipes([ROOT / "deployments/recipes/demo.yaml"], [], ALL)
    by_command = registered(client)
    env = os.environ | {
        "PWD": str(tmp_path),
        "PYTHONPATH": str(ROOT),
        "PREFECT_API_URL": PREFECT_API_URL.value(),
        "PREFECT_LOGGING_LEVEL": "ERROR",
    }
    command = [sys.executable, "-m", "prefect", "--no-prompt", "deploy", "--all", "--prefect-file"]
    done = subprocess.run(
        [*command, str(ROOT / "deployments/prefect.yaml")],
        env=env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert registered(client) == by_command


@pytest.mark.parametrize("name", ["process", "slurm", "kubernetes"])
def test_work_pool_templates_are_accepted(client: SyncPrefectClient, name: str):
    template = json.loads((ROOT / f"deployments/work-pools/{name}.json").read_text())
    kind = "kubernetes" if name == "kubernetes" else "process"
    pool = client.create_work_pool(WorkPoolCreate(name=f"try-{name}", type=kind, base_job_template=template))
    assert pool.base_job_template == template


def test_absolute_paths_change_no_key(run: Run, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(run.folder)
    relative = run.with_fields(
        model={"name_or_path": "assets/model"}, dataset={"files": ["assets/data.json"]}, store={"path": "store"}
    )
    absolute = PipelineConfig.model_validate(portable(relative))
    assert absolute.store.path == str(run.folder / "store")
    monkeypatch.chdir("/")
    assert {row.verdict for row in make_plan(absolute, ArtifactStore(absolute.store.path))} == {"hit"}


def test_watch_starts_a_run_when_a_row_has_changed_and_only_once(run: Run, client: SyncPrefectClient, write_recipe):
    deploy_recipes([write_recipe(run.config)], [], Timing())
    deployment = f"mcaflow/{run.config.name}"
    assert look(run.config, deployment) == "nothing changed"

    path = run.folder / "assets/data.json"
    path.write_text(json.dumps([*json.loads(path.read_text()), {"instruction": "new", "input": "", "output": "row"}]))
    first = look(run.config, deployment)
    assert first.startswith("dataset: dataset.files.1 data.json changed; started ")
    assert "which is Scheduled, is not finished" in look(run.config, deployment)
    (started,) = [r for r in client.read_flow_runs() if any(tag.startswith("state:") for tag in r.tags)]
    client.set_flow_run_state(started.id, Failed(), force=True)
    assert "which is Failed, is retried by hand" in look(run.config, deployment)
    # It came to its end, yet the store lacks it: somebody has removed it since.
    client.set_flow_run_state(started.id, Completed(), force=True)
    assert "; started " in look(run.config, deployment)


def test_watch_names_a_deployment_that_does_not_exist(run: Run, prefect_server: None):
    (run.folder / "assets/data.json").write_text(json.dumps([{"instruction": "a", "output": "b"}] * 20))
    with pytest.raises(ConfigError, match="has no mcaflow/absent; register it"):
        look(run.config, "mcaflow/absent")


def test_evaluation_only_refuses_to_train(run: Run):
    require_trained(run.with_fields(eval={"max_rows": 4}))
    with pytest.raises(ConfigError, match=r"stage train is not in the store.*run the deployment mcaflow/test first"):
        require_trained(run.with_fields(training={"learning_rate": 2e-3}))


def test_flows_of_deployments_load_without_the_training_stack():
    code = "import sys, flows.watch, flows.evaluation; print({'torch', 'megatron', 'transformers'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
