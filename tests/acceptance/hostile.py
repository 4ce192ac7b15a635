"""Recipes that would reach outside or run foreign code, and a token in the environment: refused, or nowhere to be seen.

    python -m tests.acceptance.hostile --folder FOLDER

Each recipe is given to `mcaflow run`, which must end with 2 and one line, and leave no file outside of its store and no
trace of the code that it brings. Then a server, its worker and a deployed run get tokens in their environment; the run
fails once and completes once. No token may stand in any file below FOLDER (the store with its keys and records, all
logs, the server's database), in any log line, parameter or artifact of the API, or on a page of the UI. Some minutes;
ends with 1 when something is wrong.
"""

import json
import secrets
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from tests.acceptance.harness import parser, show
from tests.ui import scenarios
from tests.ui.browser import chromium, missing
from tests.ui.play import write_recipe
from tests.ui.service import MCAFLOW, ROOT, one_machine

_TOKENS = ("HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY")
_TABS = ("Logs", "Task Runs", "Artifacts", "Details", "Parameters", "Job Variables")
_CODE = "from pathlib import Path\nPath({trace!r}).write_text('ran')\n"


def main(folder: Path) -> int:
    """Returns how many things went wrong."""
    if lacking := missing():
        raise SystemExit(f"NOT RUN: needs {lacking}")
    folder.mkdir(parents=True)
    recipe = write_recipe(folder)
    wrong = _recipes(folder, yaml.safe_load(recipe.read_text()))
    return wrong + _tokens(folder, recipe)


# -- recipes


def _recipes(folder: Path, good: dict[str, Any]) -> int:
    trace = folder / "trace"
    rows, wrong = [], 0
    for name, changes in _bad(folder, Path(good["model"]["name_or_path"]), trace):
        status, printed = _run(folder, good, changes)
        lines = printed.strip().splitlines()
        refused = status == 2 and len(lines) == 1 and not trace.exists()
        wrong += not refused
        rows.append((name, "refused" if refused else f"WRONG {status}", lines[-1][:110] if lines else ""))
    strays = [path.name for path in folder.parent.iterdir() if "escape" in path.name]
    strays += [path.name for path in folder.rglob("*escape*")]
    if strays:
        wrong += 1
        rows.append(("files outside of the store", f"WRONG {strays}", ""))
    show("recipes", ("recipe", "verdict", "said"), rows)
    return wrong


def _bad(folder: Path, model: Path, trace: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    data = folder / "data sets"
    data.mkdir()
    rows = [{"instruction": "a", "input": "", "output": "b"}] * 40
    (folder / "outside.json").write_text(json.dumps(rows))
    (data / "rows.json").write_text(json.dumps(rows))
    (data / "code.py").write_text(_CODE.format(trace=str(trace)))
    entries = {"out": {"file_name": "../outside.json"}, "code": {"script_url": "code.py"}, "hub": {"hf_hub_url": "a/b"}}
    (data / "dataset_info.json").write_text(json.dumps(entries))

    def named(name: str) -> dict[str, Any]:
        return {"dataset": {"files": [], "names": [name], "dataset_dir": str(data)}}

    yield "name: ../../escape", {"name": "../../escape"}
    yield "promote.model: ../escape", {"promote": {"model": "../escape"}}
    yield "promote.alias: ../escape", {"promote": {"model": "m", "alias": "../escape"}}
    yield "dataset.names: [../rows]", named("../rows")
    yield "a data set whose file_name leaves its folder", named("out")
    yield "a data set that is a script", named("code")
    yield "a data set of a hub", named("hub")
    yield "dataset.template: ../escape", {"dataset": {"template": "../escape"}}
    yield "a model's name with ../", {"model": {"name_or_path": "a/../../escape", "source": "huggingface"}}
    yield "model.trust_remote_code: true", {"model": {"trust_remote_code": True}}

    indexed = _copy(model, folder / "indexed")
    (indexed / "model.safetensors").rename(folder / "weights.safetensors")
    weights = {"model.embed_tokens.weight": "../weights.safetensors"}
    (indexed / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weights}))
    yield "weights that lie outside of the model", {"model": {"name_or_path": str(indexed)}}

    pickled = _copy(model, folder / "pickled")
    (pickled / "model.safetensors").unlink()
    # What `pickle.load` would call.
    code = _CODE.format(trace=str(trace))
    (pickled / "pytorch_model.bin").write_bytes(b"cbuiltins\nexec\n(V" + code.encode("unicode_escape") + b"\ntR.")
    yield "weights that are a pickle", {"model": {"name_or_path": str(pickled)}}

    for name in ("config.json", "tokenizer_config.json"):
        coded = _with_code(folder, model, trace, name)
        yield f"a supported model with code of its own in {name}", {"model": {"name_or_path": str(coded)}}
    unknown = _with_code(folder, model, trace, "config.json")
    config = json.loads((unknown / "config.json").read_text())
    (unknown / "config.json").write_text(json.dumps(config | {"model_type": "foreign"}))
    yield "a model of unknown type with code of its own", {"model": {"name_or_path": str(unknown)}}


def _with_code(folder: Path, model: Path, trace: Path, name: str) -> Path:
    """A copy of the model, one of whose files says that classes come from a module beside it."""
    copy = _copy(model, folder / "with-code")
    (copy / "foreign.py").write_text(_CODE.format(trace=str(trace)))
    models = {"AutoConfig": "foreign.Config", "AutoModelForCausalLM": "foreign.Model"}
    classes = models if name == "config.json" else {"AutoTokenizer": ["foreign.Tokenizer", None]}
    content = json.loads((copy / name).read_text())
    (copy / name).write_text(json.dumps(content | {"auto_map": classes}))
    return copy


def _copy(model: Path, to: Path) -> Path:
    shutil.rmtree(to, ignore_errors=True)
    return shutil.copytree(model, to)


def _run(folder: Path, good: dict[str, Any], changes: dict[str, Any]) -> tuple[int, str]:
    recipe = json.loads(json.dumps(good))
    for name, value in changes.items():
        recipe[name] = recipe.get(name, {}) | value if isinstance(value, dict) else value
    path = folder / "bad.yaml"
    path.write_text(yaml.safe_dump(recipe), encoding="utf-8")
    env = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), "PREFECT_HOME": str(folder / "home"), "HOME": str(folder)}
    done = subprocess.run([*MCAFLOW, "run", str(path)], env=env, cwd=folder, capture_output=True, text=True)
    return done.returncode, done.stderr


# -- tokens


def _tokens(folder: Path, recipe: Path) -> int:
    tokens = {name: f"hf_{secrets.token_hex(20)}" for name in _TOKENS}
    seen: list[tuple[str, str]] = []
    with one_machine(folder / "service", gpus=1, env=tokens) as service:
        service.mcaflow("deploy", str(recipe))
        with chromium(service.url) as browser:
            run = scenarios.fails_then_is_retried(service, browser, "tiny")
            pages = [f"/v2/runs/flow-run/{run.run_id}?tab={tab}" for tab in _TABS]
            pages += [
                f"/v2/{name}"
                for name in ("artifacts", "settings", "work-pools/work-pool/mcaflow", "deployments", "events")
            ]
            for path in pages:
                browser.page.goto(path)
                browser.page.wait_for_load_state("networkidle")
                text = browser.page.content()
                seen += [(path, name) for name, token in tokens.items() if token in text]
            for path in ("/api/logs/filter", "/api/artifacts/filter", "/api/flow_runs/filter", "/api/task_runs/filter"):
                text = browser.ask(path)
                seen += [(path, name) for name, token in tokens.items() if token in text]
    files = [path for path in folder.rglob("*") if path.is_file()]
    for path in files:
        content = path.read_bytes()
        seen += [(str(path.relative_to(folder)), name) for name, token in tokens.items() if token.encode() in content]
    size = sum(path.stat().st_size for path in files)
    print(f"tokens: {len(pages)} pages, 4 answers of the API, {len(files)} files ({size / 1e6:.0f} MB) searched")
    for where, name in seen:
        print(f"WRONG {name} stands in {where}")
    return len(seen)


if __name__ == "__main__":
    sys.exit(1 if main(parser(__doc__).parse_args().folder.absolute()) else 0)
