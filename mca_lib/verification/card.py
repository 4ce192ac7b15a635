"""A verification card: what was compared, at which layouts, how close it came. Markdown with JSON inside. No torch."""

import json
import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, Self

from mca_lib.errors import CheckpointError
from mca_lib.verification.difference import Measured
from mca_lib.verification.limits import Limits

FORMAT = 1
Verdict = Literal["verified", "not verified", "inconclusive"]
_FENCE = "```json card\n"


@dataclass(frozen=True)
class LayoutResult:
    """One layout of a card: measured, refused by the layout rules, or failed."""

    layout: str
    ranks: int
    refused: str | None = None
    failed: str | None = None
    everything: Measured | None = None
    with_loss: Measured | None = None
    tensors: int = 0
    different: tuple[str, ...] = ()
    """Tensors that the round trip changed."""

    def problem(self, limits: Limits) -> str | None:
        """Why this layout is not verified; a refused one is no problem."""
        if self.refused is not None:
            return None
        if self.failed is not None:
            return self.failed
        if self.everything is None or self.with_loss is None:
            return "not measured"
        if found := limits.exceeded(self.everything):
            return found
        if found := limits.exceeded(self.with_loss):
            return f"loss tokens: {found}"
        if self.different:
            return f"the round trip changes {len(self.different)} of {self.tensors} tensors, {self.different[0]} first"
        return None if self.tensors else "no tensors were compared"


@dataclass(frozen=True)
class Sensitivity:
    """A deliberate change to the model, and what the comparison then measures: it must not pass."""

    change: str
    measured: Measured
    required: bool = True
    """False: a change so small that the noise of a large model may cover it; shown all the same."""


@dataclass(frozen=True)
class Generations:
    """Greedy continuations of both models."""

    prompts: int
    tokens: int
    """Of each continuation."""
    identical: int
    first_difference: str | None = None


@dataclass(frozen=True)
class Card:
    """Of one model."""

    model_type: str
    model: str
    """Name of the model or of its directory."""
    parameters: int
    versions: dict[str, str]
    config_digest: str
    weights_digest: str
    sample_tokens: int
    loss_tokens: str
    """What the loss tokens are."""
    limits: Limits
    own_difference: Measured
    """transformers' SDPA attention, or float64, against its eager one: the yardstick; see `reference`."""
    layouts: tuple[LayoutResult, ...]
    sensitivity: tuple[Sensitivity, ...]
    unsupported: tuple[str, ...]
    generations: Generations | None = None
    largest_logit: float | None = None
    """Its absolute value in the reference; the limits of a user's model follow from it."""
    table_digest: str | None = None
    """Of the family's tables and the tiny config; cards of families only."""
    config: dict[str, Any] = field(default_factory=dict)
    """The tiny config; cards of families only."""

    def problems(self) -> list[str]:
        """What is wrong with the model; empty when nothing was found."""
        found = [f"{r.layout}: {p}" for r in self.layouts if (p := r.problem(self.limits))]
        if not any(r.everything for r in self.layouts):
            found.append("no layout was measured")
        if self.generations and self.generations.identical != self.generations.prompts:
            found.append(f"greedy generations: {self.generations.first_difference}")
        return found

    def unnoticed(self) -> list[str]:
        """Deliberate changes that would have passed, and must not: the comparison is too blunt for this model."""
        return [s.change for s in self.sensitivity if s.required and not self.limits.exceeded(s.measured)]

    def verdict(self) -> Verdict:
        """A wrong model is wrong however blunt the comparison is."""
        if self.problems():
            return "not verified"
        return "inconclusive" if self.unnoticed() else "verified"

    def headline(self) -> str:
        """The verdict in a sentence."""
        match self.verdict():
            case "not verified":
                return "; ".join(self.problems())
            case "inconclusive":
                return (
                    "nothing differs by more than the limits, but the comparison is too blunt for this model: it "
                    f"would not have noticed {' or '.join(self.unnoticed())}. The limits are too wide for how little "
                    "the model's logits depend on it; set lower ones, or verify trained weights"
                )
            case _:
                return (
                    "at every layout that was measured, Megatron-Core gives the logits of transformers up to rounding, "
                    "and the source's tensors come back bit by bit"
                )

    def to_json(self) -> str:
        return json.dumps(_finite({"format": FORMAT, **asdict(self)}), indent=1, ensure_ascii=False, allow_nan=False)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """Inverse of `to_json`'s object."""
        values = dict(values)
        if (found := values.pop("format", None)) != FORMAT:
            raise CheckpointError(f"card: format {found!r} is not {FORMAT}; generate it again")
        values["limits"] = Limits(**values["limits"])
        values["own_difference"] = _measured(values["own_difference"])
        values["layouts"] = tuple(_layout(r) for r in values["layouts"])
        changes = [s | {"measured": _measured(s["measured"])} for s in values["sensitivity"]]
        values["sensitivity"] = tuple(Sensitivity(**change) for change in changes)
        values["unsupported"] = tuple(values["unsupported"])
        values["generations"] = Generations(**values["generations"]) if values["generations"] else None
        return cls(**values)


def _finite(value: Any) -> Any:
    """JSON has no word for what is not a number: null stands for it."""
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _measured(values: dict[str, Any]) -> Measured:
    return Measured(**{k: math.nan if v is None else v for k, v in values.items()})


def _layout(values: dict[str, Any]) -> LayoutResult:
    measured = {k: _measured(values[k]) if values[k] else None for k in ("everything", "with_loss")}
    return LayoutResult(**{**values, **measured, "different": tuple(values["different"])})


def read_card(path: Path) -> Card:
    """The card that a markdown file carries. Raises CheckpointError when it carries none."""
    try:
        _, _, rest = path.read_text(encoding="utf-8").partition(_FENCE)
        return Card.from_dict(json.loads(rest.partition("\n```")[0]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path}: no verification card can be read from it ({error})") from error


def write_card(card: Card, path: Path) -> None:
    """Atomically, with its folder."""
    write_text(path, markdown(card))


def write_text(path: Path, text: str) -> None:
    """Atomically, with its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)


def markdown(card: Card) -> str:
    """The card as a document."""
    verdict = f"**{card.verdict().capitalize()}**: {card.headline()}."
    limits, own = card.limits, card.own_difference
    lines = [
        f"# {card.model}",
        "",
        verdict,
        "",
        f"Model type `{card.model_type}`, {card.parameters:,} parameters. fp32 logits of Megatron-Core",
        f"against `transformers` (eager attention, fp32) on {card.sample_tokens} tokens; loss tokens are",
        f"{card.loss_tokens}. Limits: max |Δ| ≤ {limits.max_difference:.2g}, mean KL ≤ {limits.kl:.2g}.",
        "Yardstick: `transformers` with SDPA attention (or in float64, where it has none) differs from itself with",
        f"eager attention by max |Δ| {own.max_difference:.2g}, KL {own.kl:.2g}.",
        "Source and result are the same directory, read by two libraries: weights that are wrong but finite pass.",
        "",
        *_layout_table(card),
        "",
        "## What the check notices",
        "",
        "Each change was made to the model on the side of Megatron-Core alone, and the comparison repeated: a change",
        "is noticed when the difference exceeds a limit.",
        "",
        "| change | max \\|Δ\\| | KL | noticed |",
        "| --- | --- | --- | --- |",
        *(
            f"| {s.change} | {s.measured.max_difference:.2g} | {s.measured.kl:.2g} | "
            f"{'yes' if limits.exceeded(s.measured) else '**no**'} |"
            for s in card.sensitivity
        ),
        "",
    ]
    if card.generations is not None:
        g = card.generations
        same = "identical to" if g.identical == g.prompts else "**not** all those of"
        lines += [
            "## Greedy generations",
            "",
            f"{g.identical} of {g.prompts} continuations of {g.tokens} tokens are {same} `transformers`' `generate`."
            + (f" {g.first_difference}" if g.first_difference else ""),
            "",
        ]
    lines += ["## What is refused", "", *(f"- {text}" for text in card.unsupported), ""]
    lines += [
        "## Source",
        "",
        *(f"- {name} {version}" for name, version in card.versions.items()),
        f"- config.json: `{card.config_digest}`",
        f"- weights: `{card.weights_digest}`",
        f"- made by `{'make cards' if card.table_digest else 'mcaflow verify-model'}`",
        "",
    ]
    if card.config:
        shown = ", ".join(f"`{k}={json.dumps(v)}`" for k, v in card.config.items())
        lines += [f"The tiny model has {shown}.", ""]
    return "\n".join([*lines, "## Data", "", _FENCE + card.to_json(), "```", ""])


def _layout_table(card: Card) -> list[str]:
    rows = [
        "| layout | ranks | max \\|Δ\\| | KL | max \\|Δ\\|, loss tokens | KL, loss tokens | top-1 | round trip |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for r in card.layouts:
        if r.everything is None or r.with_loss is None:
            reason = f"refused: {r.refused}" if r.refused else f"**failed**: {r.failed}"
            rows.append(f"| {r.layout} | {r.ranks} | {reason} | | | | | |")
            continue
        back = f"bitwise, {r.tensors} tensors" if not r.different else f"**{len(r.different)} of {r.tensors} differ**"
        rows.append(
            f"| {r.layout} | {r.ranks} | {r.everything.max_difference:.2g} | {r.everything.kl:.2g} | "
            f"{r.with_loss.max_difference:.2g} | {r.with_loss.kl:.2g} | {r.everything.top1:.2%} | {back} |"
        )
    return rows
