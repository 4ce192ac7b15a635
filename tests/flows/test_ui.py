"""The Prefect UI in a browser: started with the form, failed, retried. `tests/acceptance/ui.py` does more."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from flows.recipe import PipelineConfig
from tests.flows.finished import Run
from tests.ui import scenarios
from tests.ui.browser import Browser, chromium, missing
from tests.ui.service import Service, one_machine


@pytest.fixture
def service(run: Run, tmp_path: Path) -> Iterator[Service]:
    """A server and a worker; the recipe of the finished run is deployed, and all that it computes is in its store."""
    if lacking := missing():
        # .ci/run installs it, so that this cannot pass unseen there.
        assert "MCAFLOW_REQUIRE_CHROMIUM" not in os.environ, f"the tests of the UI need {lacking}"
        pytest.skip(f"NOT RUN: the tests of the UI need {lacking}")
    recipe = tmp_path / "recipe.yaml"
    # As people write them: what is not named has its default, and is not sent with a run.
    recipe.write_text(yaml.safe_dump(run.config.model_dump(mode="json", exclude_defaults=True)), encoding="utf-8")
    with one_machine(tmp_path / "service", gpus=1) as service:
        service.mcaflow("deploy", str(recipe))
        yield service


@pytest.fixture
def browser(service: Service) -> Iterator[Browser]:
    with chromium(service.url) as browser:
        yield browser


def test_what_people_do_in_the_ui(service: Service, browser: Browser, run: Run):
    name = run.config.name
    scenarios.form_to_completed(browser, name, dict.fromkeys(scenarios.STAGES, "Cached"))
    scenarios.fails_then_is_retried(service, browser, name, after={})


def test_the_form_heads_sections_with_their_names_in_the_recipe():
    schema = PipelineConfig.model_json_schema()
    sections = {name: field["$ref"] for name, field in schema["properties"].items() if "$ref" in field}
    titles = {name: schema["$defs"][reference.rpartition("/")[2]]["title"] for name, reference in sections.items()}
    assert {name: title.lower() for name, title in titles.items()} == {name: name for name in titles}
    assert "model" in titles
