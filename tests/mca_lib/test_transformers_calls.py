"""Nothing is fetched, and no code of a model's own is run, wherever transformers loads something."""

import ast
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "mca_lib"
REQUIRED = {"AutoTokenizer": set(), "auto_class": {"use_safetensors"}, "Qwen2VLImageProcessorPil": set()}
WITHOUT_CODE = {"Qwen2VLImageProcessorPil"}
"""transformers' own classes, which never run a model's code and have no switch for it."""


def calls() -> list[tuple[str, str, dict[str, ast.expr]]]:
    """(file:line, class, keywords) of every `.from_pretrained(...)` of a class of transformers."""
    return [
        (f"{path.name}:{node.lineno}", name, {k.arg: k.value for k in node.keywords if k.arg})
        for path in sorted(SOURCE.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "from_pretrained"
        and (name := class_name(node.func.value)) in REQUIRED
    ]


def class_name(node: ast.expr) -> str | None:
    """Of `Class` and of a function that returns one: `auto_class(directory)`."""
    named = node.func if isinstance(node, ast.Call) else node
    return named.id if isinstance(named, ast.Name) else None


def test_every_load_is_local_and_runs_no_code():
    found = calls()
    assert {name for _, name, _ in found} == set(REQUIRED)
    for where, name, keywords in found:
        assert REQUIRED[name] <= set(keywords), where
        expected = {"local_files_only": "True"} | ({} if name in WITHOUT_CODE else {"trust_remote_code": "False"})
        assert {flag: ast.unparse(keywords[flag]) for flag in expected} == expected, where
