"""The cards of all families, in `docs/models/`: one per family and an index. `python -m mca_lib.verification`."""

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from mca_lib.models.registry import FAMILIES
from mca_lib.ranks import RankPool
from mca_lib.verification.card import Card, read_card, write_card
from mca_lib.verification.layouts import STANDARD
from mca_lib.verification.limits import Limits
from mca_lib.verification.tables import table_digest
from mca_lib.verification.tiny import tiny_config
from mca_lib.verification.verify import Tell, Verification, on_one_rank, verify

INDEX = "README.md"


def family_card(
    model_type: str, pool: RankPool, layouts: Sequence[str] = STANDARD, tell: Tell = lambda text: None
) -> Card:
    """The card of a family's tiny model."""
    with tempfile.TemporaryDirectory(prefix="mcaflow-card-") as folder:
        directory = Path(folder, f"tiny {model_type}")
        on_one_rank(pool, "mca_lib.verification.tiny:make_tiny", directory, model_type)
        card = verify(Verification(directory, tuple(layouts), Limits(), generate=True, tiny=True), pool, tell)
    return replace(card, table_digest=table_digest(model_type), config=tiny_config(model_type))


def write_family_cards(folder: Path, model_types: Sequence[str], tell: Tell) -> list[str]:
    """Write the cards of these families and the index of all; returns what is not verified."""
    problems = []
    with RankPool() as pool:
        for model_type in model_types:
            card = family_card(model_type, pool, tell=lambda text, name=model_type: tell(f"{name:<12} {text}"))
            write_card(card, folder / f"{model_type}.md")
            if card.verdict() != "verified":
                problems.append(f"{model_type}: {card.headline()}")
    write_index(folder)
    return problems


def write_index(folder: Path) -> None:
    """The table of all families and layouts, from the cards that are there."""
    cards = [read_card(path) for m in FAMILIES if (path := folder / f"{m}.md").is_file()]
    lines = [
        "# Verification cards",
        "",
        "A tiny random model of every family, with every feature of its config table on, against `transformers` in",
        "fp32 with eager attention. A cell is the largest |Δ| of a logit and the mean KL over all tokens, which may",
        f"be {Limits().max_difference:g} and {Limits().kl:g} at most; every measured layout also gives the source's",
        "tensors back bit by bit. A dash is a layout that the model cannot have; the card says why. `make cards`",
        "generates all of it anew. Multi-token prediction layers, which `transformers` does not compute, are compared",
        "by their bytes alone. Of real weights: [SmolLM2-135M-Instruct](real/SmolLM2-135M-Instruct.md).",
        "",
        "| family | " + " | ".join(STANDARD) + " | verified |",
        "| --- " * (len(STANDARD) + 2) + "|",
    ]
    for card in cards:
        results = {result.layout: result for result in card.layouts}
        cells = []
        for name in STANDARD:
            measured = results[name].everything if name in results else None
            cells.append(f"{measured.max_difference:.1e}, {measured.kl:.0e}" if measured else "–")
        verdict = "yes" if card.verdict() == "verified" else card.verdict()
        lines.append(f"| [{card.model_type}]({card.model_type}.md) | " + " | ".join(cells) + f" | {verdict} |")
    (folder / INDEX).write_text("\n".join([*lines, ""]), encoding="utf-8")
