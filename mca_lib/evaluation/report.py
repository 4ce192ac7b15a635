"""The evaluation in words and tables, as Markdown."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

MINUS = "\N{MINUS SIGN}"


def markdown(metrics: Mapping[str, Any], samples: Sequence[Mapping[str, Any]]) -> str:
    """The report of `metrics.json` and of the lines of `samples.jsonl`; see `mca_lib/evaluate.py` for both."""
    parts = ["# Evaluation", *_figures(metrics)]
    if samples:
        parts += ["## Samples", *(_sample(number, sample) for number, sample in enumerate(samples, start=1))]
    return "\n\n".join(parts) + "\n"


def comparison(metrics: Mapping[str, Any]) -> list[list[str]]:
    """The models side by side: a heading, then one row per measure; the heading alone when nothing was measured."""
    models, change, tasks = metrics["models"], metrics["difference"], metrics.get("tasks", {})
    rows = [["measure", *(models or next(iter(tasks.values()), {}))]]
    if metrics["documents"]:
        rows += [
            ["held-out loss", *(f"{m['loss']:.4f}" for m in models.values())],
            ["perplexity", *(_perplexity(m["perplexity"]) for m in models.values())],
            ["next-token accuracy", *(f"{m['accuracy']:.1%}" for m in models.values())],
        ]
    if change:
        for row, cell in zip(rows, ["change", *_changes(change)], strict=True):
            row.append(cell)
    elif tasks:
        rows[0].append("change")
    return [*rows, *_preference(metrics), *(_task(name, figures) for name, figures in tasks.items())]


def with_production(metrics: Mapping[str, Any], production: Mapping[str, Any]) -> dict[str, Any]:
    """`metrics` with a column for the model in production, which `production` measured as its `trained`."""
    merged = dict(metrics)
    if "tasks" in metrics:
        theirs = production["tasks"]
        merged["tasks"] = {name: _between(found, theirs[name]["trained"]) for name, found in metrics["tasks"].items()}
    if not metrics["documents"]:
        return merged
    merged["models"] = _between(metrics["models"], production["models"]["trained"])
    if "preference" in metrics:
        ours, theirs = metrics["preference"], production["preference"]
        likelier = _between(ours["likelier"], theirs["likelier"]["trained"])
        merged["preference"] = {**ours, "likelier": likelier, "production": theirs}
    return merged


def _between(models: Mapping[str, Any], production: Any) -> dict[str, Any]:
    return {"base": models["base"], "production": production, "trained": models["trained"]}


def _preference(metrics: Mapping[str, Any]) -> list[list[str]]:
    """Rows about pairs of answers, where the data set holds such."""
    if "preference" not in metrics:
        return []
    figures = metrics["preference"]
    likelier = list(figures["likelier"].values())
    # Of the base model there are none.
    rewards = [figures["production"], figures] if "production" in figures else [figures]
    change = f"{100 * (likelier[-1] - likelier[0]):+.1f} points".replace("-", MINUS)
    return [
        ["chosen answer likelier", *(f"{share:.1%}" for share in likelier), change],
        ["reward accuracy", "", *(f"{each['reward_accuracy']:.1%}" for each in rewards), ""],
        ["reward margin", "", *(_margin(each) for each in rewards), ""],
    ]


def _task(name: str, figures: Mapping[str, Any]) -> list[str]:
    """A measure of lm-eval. The models answer the same questions, so the errors are no measure of the change."""
    cells = [
        f"{each['value']:.4f}" + ("" if each["stderr"] is None else f" ± {each['stderr']:.4f}")
        for each in figures.values()
    ]
    values = [each["value"] for each in figures.values()]
    return [name, *cells, f"{values[-1] - values[0]:+.4f}".replace("-", MINUS)]


def _margin(figures: Mapping[str, Any]) -> str:
    stderr = figures["reward_margin_stderr"]
    margin = f"{figures['reward_margin']:+.3f}" + ("" if stderr is None else f" ± {stderr:.3f}")
    return margin.replace("-", MINUS)


def note(metrics: Mapping[str, Any]) -> str:
    """How many rows and tokens the figures rest on."""
    if "preference" in metrics:
        return (
            f"{metrics['preference']['pairs']} held-out pairs, {metrics['tokens']} tokens with loss in chosen answers"
        )
    return metrics["note"] or f"{metrics['documents']} held-out documents, {metrics['tokens']} tokens with loss"


def _figures(metrics: Mapping[str, Any]) -> list[str]:
    unmeasured = (
        [] if metrics["documents"] else [f"{metrics['note'].capitalize()}: loss and accuracy were not measured."]
    )
    heading, *rows = comparison(metrics)
    if not rows:
        return unmeasured
    rule = ["---", *("---:" for _ in heading[1:])]
    table = "\n".join(f"| {' | '.join(row)} |" for row in (heading, rule, *rows))
    difference = metrics["difference"]
    has_error = difference and difference["loss_stderr"] is not None
    paired = " ± is one standard error of the paired differences." if has_error else ""
    return [table, *(unmeasured or [f"{note(metrics)}.{paired}"])]


def _perplexity(value: float | None) -> str:
    return "too large" if value is None else f"{value:.4g}" if value < 1e6 else f"{value:.2e}"


def _changes(difference: Mapping[str, Any]) -> list[str]:
    stderr = difference["loss_stderr"]
    loss = f"{difference['loss']:+.4f}" + ("" if stderr is None else f" ± {stderr:.4f}")
    return [loss.replace("-", MINUS), "", f"{100 * difference['accuracy']:+.1f} points".replace("-", MINUS)]


def _sample(number: int, sample: Mapping[str, Any]) -> str:
    blocks = {"prompt": sample["prompt"], **sample["answers"]}
    if sample["reference"] is not None:
        blocks["reference"] = sample["reference"]
    return "\n\n".join([f"### {number}", *(f"{name}\n\n{_fenced(text)}" for name, text in blocks.items())])


def _fenced(text: str) -> str:
    """A code block, with a fence longer than any in the text."""
    fence = "`" * max([3, *(len(run) + 1 for run in re.findall("`+", text))])
    return f"{fence}text\n{text}\n{fence}"
