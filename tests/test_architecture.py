"""Imports point one way, and light modules stay light: the table in docs/architecture.md, checked."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

HEAVY = {"torch", "megatron", "transformers", "llamafactory", "peft", "datasets", "accelerate", "trl"}
NEVER = {
    "flows": HEAVY,
    "tasks": HEAVY | {"prefect", "flows"},
    "mca_lib": {"prefect", "flows", "tasks"},
}
PICKLES_BETWEEN_OWN_PROCESSES = {ROOT / "mca_lib/ranks.py", ROOT / "mca_lib/rank_server.py"}
LLAMAFACTORY_LIVES_IN = {"mca_lib/data/llamafactory.py", "mca_lib/trainers/llama_factory/backend.py"}


def imports(path: Path, *, module_level: bool = False) -> Iterator[str]:
    """Top-level packages that a file imports, anywhere or at module level only."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in tree.body if module_level else ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module.split(".")[0]


def sources(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


@pytest.mark.parametrize("package", NEVER)
def test_imports_point_one_way(package: str):
    wrong = {
        f"{path.relative_to(ROOT)} imports {name}"
        for path in sources(package)
        for name in imports(path)
        if name in NEVER[package]
    }
    assert not wrong


def test_llamafactory_is_imported_in_two_modules():
    found = {str(path.relative_to(ROOT)) for path in sources("mca_lib") if "llamafactory" in set(imports(path))}
    assert found <= LLAMAFACTORY_LIVES_IN


@pytest.mark.parametrize(
    ("statement", "absent"),
    [
        ("import flows.cli", HEAVY | {"prefect", "pydantic", "rich"}),
        ("import flows.commands, flows.plan, flows.preflight, flows.graph", HEAVY | {"prefect"}),
        ("import flows.inspect_command, flows.model_commands, mca_lib.verification.verify", HEAVY | {"prefect"}),
        ("import mca_lib.job, mca_lib.models.registry, mca_lib.data.rows", HEAVY | {"prefect", "tasks"}),
    ],
)
def test_light_modules_stay_light(statement: str, absent: set[str]):
    code = f"{statement}\nimport sys; print(*(set({sorted(absent)!r}) & set(sys.modules)))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert run.stdout.split() == []


def test_nothing_is_unpickled():
    """A pickle runs the code of whoever wrote it; a store may be shared."""
    calls = [
        f"{path.relative_to(ROOT)}: {word}"
        for package in NEVER
        for path in sources(package)
        if path not in PICKLES_BETWEEN_OWN_PROCESSES
        for word in ("weights_only=False", "pickle.load", "import pickle")
        if word in path.read_text(encoding="utf-8")
    ]
    assert calls == []
