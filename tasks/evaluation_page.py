"""What the report of an evaluation shows of the artifacts that it rests on: training, data, lineage, key payloads.

Of their records it takes what the content decides, and no times, hosts or speeds: so the page is the same bytes for the
same artifacts. `flows/run_page.py` adds what belongs to one run.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mca_lib.errors import ModelError
from mca_lib.evaluation.chart import Series, line_chart
from mca_lib.evaluation.page import Report
from mca_lib.models.config import read_json
from tasks.record import ArtifactRecord
from tasks.store import Artifact, ArtifactStore, Lineage

CURVES = {"loss": {"loss": "training", "eval_loss": "held out"}, "learning rate": {"learning_rate": "training"}}
"""Title of a chart -> the curves of a training's record that it has, and what they are called there."""


def report_of(
    store: ArtifactStore,
    inputs: Mapping[str, Artifact],
    metrics: Mapping[str, Any],
    samples: Sequence[Mapping[str, Any]],
) -> Report:
    """The report on `trained` of `inputs`, which are those of the evaluation by role."""
    records = {(record.stage, record.key): record for record in _records(store, inputs)}.values()
    statistics = next((record.stats for record in records if record.stage == "train"), {})
    return Report(
        title="Evaluation",
        metrics=metrics,
        samples=samples,
        facts=_facts(inputs),
        charts=tuple(chart for title in CURVES if (chart := curve_chart(statistics, title))),
        training=_training(statistics),
        data=_data(inputs["dataset"].record.stats),
        lineage=[
            ["stage", "key", "content"],
            *([record.stage, record.key, record.digest[:16]] for record in records),
        ],
        recipe={f"{record.stage} {record.key[:12]}": record.payload["identity"] for record in records},
    )


def curve_chart(statistics: Mapping[str, Any], title: str) -> str:
    """The SVG of one of `CURVES`; "" where the record has no such curve."""
    curves = statistics.get("curves", {})
    series = [
        Series(
            shown, [(float(step), value) for step, value in curves.get(name, {}).items() if not isinstance(value, str)]
        )
        for name, shown in CURVES[title].items()
    ]
    return line_chart(title, series)


def _records(store: ArtifactStore, inputs: Mapping[str, Artifact]) -> Iterator[ArtifactRecord]:
    """Of all that went in, sources first; some of them more than once."""

    def walk(node: Lineage) -> Iterator[ArtifactRecord]:
        for parent in node.inputs:
            yield from walk(parent)
        if node.artifact is not None:
            yield node.artifact.record

    for role in ("base", "dataset", "trained"):
        yield from walk(store.lineage(inputs[role]))


def _facts(inputs: Mapping[str, Artifact]) -> dict[str, str]:
    try:
        config = read_json(inputs["base"].path / "config.json", ModelError)
    except ModelError:
        return {}
    text = config.get("text_config") or config
    sizes = [
        f"{text[name]:,} {what}"
        for name, what in (("num_hidden_layers", "layers"), ("hidden_size", "channels"), ("vocab_size", "tokens"))
        if isinstance(text.get(name), int)
    ]
    return {"model": ", ".join([str(config.get("model_type", "unknown")), *sizes])}


def _training(statistics: Mapping[str, Any]) -> dict[str, str]:
    best = statistics.get("best")
    found = {
        "steps": _number(statistics.get("steps")),
        "epochs": _number(statistics.get("epochs")),
        "tokens": _number(statistics.get("tokens")),
        "tokens with loss": _number(statistics.get("trained_tokens")),
        "mean loss": _number(statistics.get("train_loss")),
        "last loss": _number(statistics.get("final_loss")),
        "held-out loss at the end": _number(statistics.get("eval_loss")),
        "best": f"step {best['step']}, held-out loss {best['loss']:.4f}" if best else "",
    }
    return {name: text for name, text in found.items() if text}


def _data(statistics: Mapping[str, Any]) -> dict[str, str]:
    """Of a token store or an indexed data set."""
    facts: dict[str, str] = {}
    rows = statistics.get("rows", {})
    if isinstance(rows, dict) and "read" in rows:
        left_out = {what: sum(rows.get(what, {}).values()) for what in ("bad", "dropped")}
        facts["rows"] = ", ".join(
            [
                f"{rows['read']:,} read",
                *(f"{n:,} {what}" for what, n in left_out.items() if n),
                f"{rows['kept']:,} kept",
            ]
        )
    for split, counted in statistics.get("splits", {}).items():
        shown = [
            f"{counted[name]:,} {what}"
            for name, what in (
                ("documents", "documents"),
                ("rows", "rows"),
                ("tokens", "tokens"),
                ("loss_tokens", "with loss"),
            )
            if isinstance(counted.get(name), int)
        ]
        length = counted.get("document_length")
        lengths = (
            [f"documents of {length['min']} to {length['max']} tokens, half below {length['median']}"] if length else []
        )
        facts[split] = ", ".join([*shown, *lengths])
    return facts


def _number(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return ""
    return f"{value:,}" if isinstance(value, int) else f"{value:.5g}"
