"""What the ranks of the tests of peers' defects run."""

from pathlib import Path
from typing import Any


def save_as_trained(source: Path, target: Path) -> None:
    """Save a model whose arguments are those of a training run: recomputation, bf16."""
    from mca_lib.models import AutoModel
    from tests.mca_lib.models.factory_ranks import start

    args = start(bf16=True)
    args.recompute_granularity = "full"
    models = AutoModel.from_pretrained(source, args)
    assert models.config.recompute_granularity == "full"
    models.save_pretrained(target)


def held_names(layout: dict[str, Any], directory: Path) -> list[str]:
    """Names in the checkpoint of what this rank holds."""
    from mca_lib.models import AutoModel
    from tests.mca_lib.models.factory_ranks import start

    return [name for name, _ in AutoModel.from_pretrained(directory, start(**layout)).named_parameters()]
