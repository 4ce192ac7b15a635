"""Nothing is fetched, and no code of a model's own is run, wherever transformers loads something."""

import ast
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "mca_lib"
REQUIRED = {"AutoTokenizer": set(), "AutoModelForCausalLM": {"use_safetensors"}}


def calls() -> list[tuple[str, str, dict[str, ast.expr]]]:
    """(file:line, class, keywords) of every `<class of transformers>.from_pretrained(...)`."""
    return [
        (f"{path.name}:{node.lineno}", node.func.value.id, {k.arg: k.value for k in node.keywords if k.arg})
        for path in sorted(SOURCE.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "from_pretrained"
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id in REQUIRED
    ]


def test_every_load_is_local_and_runs_no_code():
    found = calls()
    assert {name for _, name, _ in found} == set(REQUIRED)
    for where, name, keywords in found:
        assert REQUIRED[name] <= set(keywords), where
        flags = {flag: ast.unparse(keywords[flag]) for flag in ("local_files_only", "trust_remote_code")}
        assert flags == {"local_files_only": "True", "trust_remote_code": "False"}, where
