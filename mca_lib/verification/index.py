"""The index of the families' cards, made of them: what each has, where it was measured, how close it came. No torch."""

from pathlib import Path

from mca_lib.models.registry import FAMILIES, config_from_hf
from mca_lib.verification.card import Card, read_card, write_text
from mca_lib.verification.features import features, known_limits
from mca_lib.verification.layouts import STANDARD
from mca_lib.verification.limits import Limits

INDEX = "README.md"


def write_index(folder: Path) -> None:
    """The tables of all families, from the cards that are there."""
    cards = [read_card(path) for m in FAMILIES if (path := folder / f"{m}.md").is_file()]
    lines = [
        "# Verification cards",
        "",
        "A tiny random model of every family, with every feature of its config table on, against `transformers` in",
        "fp32 with eager attention. `make cards` generates all of this anew. Of real weights:",
        "[SmolLM2-135M-Instruct](real/SmolLM2-135M-Instruct.md). Transformer Engine's layers were not run.",
        "",
        "| family | features, beside the Llama layer's | layouts | checked on | known limits | verified |",
        "| --- | --- | --- | --- | --- | --- |",
        *map(_summary, cards),
        "",
        "## Figures",
        "",
        "The largest |Δ| of a logit and the mean KL over all tokens, which may",
        f"be {Limits().max_difference:g} and {Limits().kl:g} at most; every measured layout also gives the source's",
        "tensors back bit by bit. A dash is a layout that the model cannot have; the card says why. Multi-token",
        "prediction layers, which `transformers` does not compute with the model, are compared by their bytes alone",
        "here; their gradients are compared by the tests.",
        "",
        "| family | " + " | ".join(STANDARD) + " |",
        "| --- " * (len(STANDARD) + 1) + "|",
        *map(_figures, cards),
    ]
    write_text(folder / INDEX, "\n".join([*lines, ""]))


def _summary(card: Card) -> str:
    config = config_from_hf(card.config)
    measured = [result.layout for result in card.layouts if result.everything is not None]
    layouts = "all" if len(measured) == len(STANDARD) else ", ".join(measured)
    cells = (
        f"[{card.model_type}]({card.model_type}.md)",
        ", ".join(features(config)) or "–",
        layouts,
        ", ".join(f"{name} {version}" for name, version in card.versions.items()),
        "; ".join(known_limits(card, config)),
        "yes" if card.verdict() == "verified" else card.verdict(),
    )
    return f"| {' | '.join(cells)} |"


def _figures(card: Card) -> str:
    results = {result.layout: result.everything for result in card.layouts}
    found = [results.get(name) for name in STANDARD]
    cells = [f"{measured.max_difference:.1e}, {measured.kl:.0e}" if measured else "–" for measured in found]
    return f"| [{card.model_type}]({card.model_type}.md) | {' | '.join(cells)} |"
