"""All scenarios of `tests.ui.scenarios` on one service: what the acceptance scripts for SQLite and PostgreSQL share."""

import time
import traceback
from pathlib import Path

import yaml

from mca_lib.demo_assets import make_demo_assets
from tests.acceptance.harness import show
from tests.ui import scenarios
from tests.ui.browser import chromium
from tests.ui.service import Service

CREDENTIALS = "ops:correct-horse-battery-staple"
AUTH = {"PREFECT_SERVER_API_AUTH_STRING": CREDENTIALS, "PREFECT_API_AUTH_STRING": CREDENTIALS}
_NAME = "tiny"


def write_recipe(folder: Path) -> Path:
    """A recipe of two ranks and few steps, with its model, its data and a store, all in the folder."""
    assets = make_demo_assets(folder / "demo")
    recipe = {
        "name": _NAME,
        "model": {"name_or_path": str(assets.model_dir)},
        "dataset": {"files": [str(assets.data_file)], "template": "chatml", "cutoff_len": 128},
        "training": {"max_steps": 4, "learning_rate": 1e-3, "precision": "fp32"},
        "launcher": {"nproc_per_node": 2},
        "eval": {"num_samples": 2, "max_new_tokens": 8, "max_rows": 16},
        "store": {"path": str(folder / "store")},
    }
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe), encoding="utf-8")
    return path


def play(service: Service, recipe: Path, title: str) -> int:
    """Deploy, log in, play; prints a table and returns how many scenarios went wrong. Pictures go to the folder."""
    rows: list[tuple[object, ...]] = []
    service.mcaflow("deploy", str(recipe))
    with chromium(service.url, service.folder / "pictures", CREDENTIALS) as browser:
        steps = [("the form for the password", lambda: scenarios.logs_in(browser, CREDENTIALS))]
        for name, scenario in [*steps, *scenarios.all_of(service, browser, _NAME)]:
            began = time.monotonic()
            try:
                scenario()
                verdict = "as it should be"
            except Exception as error:
                browser.picture(f"wrong-{len(rows)}")
                traceback.print_exc()
                verdict = f"WRONG {str(error).splitlines()[0]}"
            rows.append((name, f"{time.monotonic() - began:.0f}", verdict))
            print(*rows[-1], sep="  ", flush=True)
    show(title, ("scenario", "seconds", "verdict"), rows)
    return sum("WRONG" in str(row[-1]) for row in rows)
