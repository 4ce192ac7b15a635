"""What the ranks of the hybrid models' tests run."""

from pathlib import Path
from typing import Any

from tests.mca_lib.models.hybrid.configs import hybrid_config


def build(names: list[str], layout: dict[str, Any], directory: Path | None = None) -> dict[str, dict[str, tuple]]:
    """Hybrid → name and shape of each tensor that this rank holds; random models, saved below `directory`."""
    from mca_lib.models import AutoModel
    from mca_lib.models.naming import checkpoint_parameters

    args, held = _start(layout), {}
    for name in names:
        models = AutoModel.from_config(hybrid_config(name), args)
        held[name] = {n: tuple(t.shape) for model in models for n, t in checkpoint_parameters(model)}
        if directory is not None:
            models.save_pretrained(directory / name)
    return held


def save_again(source: Path, target: Path, names: list[str], layout: dict[str, Any]) -> None:
    """Load checkpoints at a layout, and save them from there."""
    from mca_lib.models import AutoModel

    args = _start(layout)
    for name in names:
        AutoModel.from_pretrained(source / name, args).save_pretrained(target / name)


def logits_beside_the_transformer(directory: Path, pattern: str, mamba: dict[str, int]) -> tuple[float, float]:
    """Largest difference of the logits of a hybrid that starts as its transformer, and the largest of these.

    The second row of the batch is the same as the first but for its last token.
    """
    import torch

    from mca_lib.models import AutoModel
    from mca_lib.trainers import Seq2SeqTrainingArguments

    _start({})
    args = Seq2SeqTrainingArguments(
        output_dir="unused", hybrid_layer_pattern=pattern, fresh_layers="zero_output", **mamba
    )
    ids_BS = torch.randint(0, 99, (2, 16), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        positions_BS = torch.arange(16).expand(2, 16)
        logits = [AutoModel.from_pretrained(directory, a)[0].eval()(ids_BS, positions_BS) for a in (None, args)]
    return (logits[0] - logits[1]).abs().max().item(), logits[0].abs().max().item()


def _start(layout: dict[str, Any]) -> Any:
    from mca_lib.parallel import initialize_model_parallel
    from tests.mca_lib.models.layouts import layout_args

    args = layout_args(**layout)
    initialize_model_parallel(args)
    return args
