"""The cards of all families, in `docs/models/`: one per family and an index. `python -m mca_lib.verification`."""

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from mca_lib.ranks import RankPool
from mca_lib.verification.card import Card, write_card
from mca_lib.verification.index import write_index
from mca_lib.verification.layouts import STANDARD
from mca_lib.verification.limits import Limits
from mca_lib.verification.tables import table_digest
from mca_lib.verification.tiny import tiny_config
from mca_lib.verification.verify import Tell, Verification, on_one_rank, verify


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
