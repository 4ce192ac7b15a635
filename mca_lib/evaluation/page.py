"""The report as one HTML file that needs nothing else: no script, no style sheet, no address outside of it.

Everything that comes from data, models or recipes is escaped. The same content gives the same bytes.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

from mca_lib.evaluation.report import comparison, note

_STYLE = """\
:root{color-scheme:light dark;--ink:#1d2026;--paper:#fff;--soft:#f2f4f7;--line:#d5dae1;--dim:#5c6673}
@media(prefers-color-scheme:dark){:root{--ink:#e3e6eb;--paper:#16181d;--soft:#20242b;--line:#38404b;--dim:#98a2b0}}
body{margin:2rem auto;max-width:62rem;padding:0 1rem;background:var(--paper);color:var(--ink);font:15px/1.5 sans-serif}
h1{font-size:1.5rem}h2{font-size:1.15rem;margin-top:2rem}h3{font-size:1rem}
table{border-collapse:collapse}th,td{padding:.2rem .8rem .2rem 0;border-bottom:1px solid var(--line);text-align:left}
td+td,th+th{text-align:right}.facts td+td,.facts th+th{text-align:left;overflow-wrap:anywhere}
pre,code{background:var(--soft);font:13px/1.45 monospace}pre{padding:.6rem;white-space:pre-wrap;overflow-wrap:anywhere}
svg{max-width:100%;height:auto}.dim{color:var(--dim)}"""


@dataclass(frozen=True)
class Report:
    """What the page shows. Empty parts are left out."""

    title: str
    metrics: Mapping[str, Any]
    """Of mca_lib/evaluate.py."""
    samples: Sequence[Mapping[str, Any]] = ()
    facts: Mapping[str, str] = field(default_factory=dict)
    """What a person asks first, above all else."""
    charts: Sequence[str] = ()
    """SVG of `mca_lib.evaluation.chart`; the one thing here that is put in as it is."""
    training: Mapping[str, str] = field(default_factory=dict)
    data: Mapping[str, str] = field(default_factory=dict)
    stages: Sequence[Sequence[str]] = ()
    """A heading and a row for each stage of a run."""
    lineage: Sequence[Sequence[str]] = ()
    """Likewise for each artifact that went in."""
    recipe: Mapping[str, Any] = field(default_factory=dict)
    """Section -> fields."""


def html_page(report: Report) -> str:
    """The file's text."""
    heading, *rows = comparison(report.metrics)
    errors = f". {_ERRORS}" if rows else ""
    parts = [
        f"<h1>{escape(report.title)}</h1>",
        _facts(report.facts),
        _section("Evaluation", _table(heading, rows) if rows else "", _paragraph(note(report.metrics) + errors)),
        _section("Training", *report.charts, _facts(report.training)),
        _section("Data", _facts(report.data)),
        _section("Stages of this run", _table(report.stages[0], report.stages[1:]) if report.stages else ""),
        _section("Samples", *(_sample(number, sample) for number, sample in enumerate(report.samples, start=1))),
        _section("Lineage", _table(*_split(report.lineage), css="facts") if report.lineage else ""),
        _section("Recipe", *(_fields(name, fields) for name, fields in report.recipe.items())),
    ]
    body = "\n".join(part for part in parts if part)
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{escape(report.title)}</title>\n'
        f'<meta name="viewport" content="width=device-width">\n<style>\n{_STYLE}\n</style>\n</head>\n<body>\n{body}\n'
        "</body>\n</html>\n"
    )


_ERRORS = "± is one standard error; that of the loss is of the differences, document by document"


def _split(rows: Sequence[Sequence[str]]) -> tuple[Sequence[str], Sequence[Sequence[str]]]:
    return rows[0], rows[1:]


def _section(title: str, *content: str) -> str:
    shown = [part for part in content if part]
    return "\n".join([f"<h2>{title}</h2>", *shown]) if shown else ""


def _paragraph(text: str) -> str:
    return f'<p class="dim">{escape(text[:1].upper() + text[1:])}.</p>'


def _facts(facts: Mapping[str, str]) -> str:
    if not facts:
        return ""
    rows = (f"<tr><td>{escape(name)}</td><td>{escape(value)}</td></tr>" for name, value in facts.items())
    return '<table class="facts">\n' + "\n".join(rows) + "\n</table>"


def _table(heading: Sequence[str], rows: Sequence[Sequence[str]], css: str = "figures") -> str:
    head = "".join(f"<th>{escape(cell)}</th>" for cell in heading)
    body = ("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<table class="{css}">\n<tr>{head}</tr>\n' + "\n".join(body) + "\n</table>"


def _sample(number: int, sample: Mapping[str, Any]) -> str:
    blocks = {"prompt": sample["prompt"], **sample["answers"]}
    if sample["reference"] is not None:
        blocks["reference"] = sample["reference"]
    shown = (f"<p>{escape(name)}</p>\n<pre>{escape(text)}</pre>" for name, text in blocks.items())
    return "\n".join([f"<h3>{number}</h3>", *shown])


def _fields(name: str, fields: Any) -> str:
    text = json.dumps(fields, indent=1, sort_keys=True, ensure_ascii=False)
    return f"<details><summary>{escape(name)}</summary>\n<pre>{escape(text)}</pre></details>"
