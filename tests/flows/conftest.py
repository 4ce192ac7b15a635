"""One real run of the pipeline for the session; each test that changes something works on a copy of its store."""

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

# Read by Prefect when it is imported.
os.environ.setdefault("DO_NOT_TRACK", "1")
os.environ.setdefault("PREFECT_SERVER_ANALYTICS_ENABLED", "false")
os.environ.setdefault("PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL", "CRITICAL")

import pytest
import yaml
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.testing.utilities import prefect_test_harness

from flows.pipeline import pipeline
from flows.recipe import PipelineConfig
from mca_lib.demo_assets import make_demo_assets
from tests.flows.finished import Run


@pytest.fixture(scope="session")
def prefect_server() -> Iterator[None]:
    """A Prefect server of the session's own."""
    with prefect_test_harness(server_startup_timeout=120):
        yield


@pytest.fixture
def client(prefect_server: None) -> Iterator[SyncPrefectClient]:
    """Of the session's server."""
    with get_client(sync_client=True) as client:
        yield client


@pytest.fixture(scope="session")
def finished(prefect_server: None, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The demonstration, shortened, run once from start to end."""
    folder = tmp_path_factory.mktemp("finished")
    assets = make_demo_assets(folder / "assets")
    config = PipelineConfig.model_validate(
        {
            "name": "test",
            "model": {"name_or_path": str(assets.model_dir)},
            "dataset": {"files": [str(assets.data_file)], "template": "chatml", "cutoff_len": 128},
            "training": {"max_steps": 4, "learning_rate": 1e-3, "precision": "fp32", "save_steps": 2},
            "launcher": {"nproc_per_node": 2},
            "eval": {"num_samples": 1, "max_new_tokens": 4, "max_rows": 8},
            "store": {"path": str(folder / "store")},
        }
    )
    return Run(folder, config, pipeline(config))


@pytest.fixture
def run(finished: Run, tmp_path: Path) -> Run:
    """A copy of the finished run, to change at will. The model lies in the copy too."""
    folder = tmp_path / "run"
    shutil.copytree(finished.folder, folder)
    content = finished.config.model_dump()
    content["model"]["name_or_path"] = str(folder / "assets" / "model")
    content["dataset"]["files"] = [str(folder / "assets" / "data.json")]
    content["store"]["path"] = str(folder / "store")
    return Run(folder, PipelineConfig.model_validate(content), finished.result)


@pytest.fixture
def write_recipe(tmp_path: Path) -> Callable[[PipelineConfig], Path]:
    """Write a recipe to a file, for the command line."""

    def write(config: PipelineConfig) -> Path:
        path = tmp_path / "recipe.yaml"
        path.write_text(yaml.safe_dump(config.model_dump(mode="json")), encoding="utf-8")
        return path

    return write
