"""What the documents name exists: tests, files, folders."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
TEST = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")
LINK = re.compile(r"\]\((?!https?://|#|mailto:)([^)#\s]+)")


@cache
def _functions(path: Path) -> set[str]:
    return {node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_test_that_a_document_names_exists(document: Path) -> None:
    named = TEST.findall(document.read_text())
    absent = [f"{file}::{name}" for file, name in named if name not in _functions(ROOT / file)]
    assert not absent, absent


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_relative_link_of_a_document_leads_somewhere(document: Path) -> None:
    links = LINK.findall(document.read_text())
    absent = [link for link in links if not (document.parent / link).exists()]
    assert not absent, absent
