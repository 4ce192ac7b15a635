"""Names of LLaMA-Factory's chat templates, without importing LLaMA-Factory (which takes seconds and torch)."""

import ast
import importlib.util
from functools import cache
from pathlib import Path

from mca_lib.data.suggest import suggestion
from mca_lib.errors import ConfigError


@cache
def template_names() -> tuple[str, ...]:
    """All template names, sorted, read from the source of the installed LLaMA-Factory."""
    # find_spec of a top-level package finds it without running it.
    package = importlib.util.find_spec("llamafactory")
    if package is None or not package.submodule_search_locations:
        raise ConfigError("dataset.template: llamafactory is not installed; run `make setup`")
    source = Path(package.submodule_search_locations[0], "data", "template.py").read_text(encoding="utf-8")
    calls = (node.value for node in ast.parse(source).body if isinstance(node, ast.Expr))
    return tuple(sorted(name for call in calls if (name := _registered_name(call)) is not None))


def check_template(name: str) -> None:
    """Raise ConfigError, with the nearest name, when LLaMA-Factory has no template of this name."""
    names = template_names()
    if name not in names:
        raise ConfigError(f"dataset.template: unknown template {name!r}{suggestion(name, names)}")


def _registered_name(call: ast.expr) -> str | None:
    if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "register_template"):
        return None
    return next((k.value.value for k in call.keywords if k.arg == "name" and isinstance(k.value, ast.Constant)), None)
