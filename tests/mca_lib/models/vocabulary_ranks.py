"""What the ranks of the vocabulary tests run."""

from pathlib import Path
from typing import Any

from tests.mca_lib.models.layouts import layout_args

OLD, NEW = 99, 130
"""Rows of the source and of the tokenizer; with four ranks, whole shares are new."""


class Tokenizer:
    """As far as the model is concerned."""

    def __init__(self, size: int) -> None:
        self.size = size

    def get_vocab(self) -> dict[str, int]:
        return {"a": 0, "b": self.size - 1}


def load(layout: dict[str, Any], directory: Path, size: int) -> Any:
    from mca_lib.models import AutoModel
    from mca_lib.parallel import initialize_model_parallel

    args = layout_args(**layout)
    initialize_model_parallel(args)
    return AutoModel.from_pretrained(directory, args, tokenizer=Tokenizer(size))


def grown(layout: dict[str, Any], directory: Path, size: int) -> tuple[int, int, dict[str, Any], dict[str, Any]]:
    """(Tensor rank, rows by config, hf_config, name → this rank's rows as an array)."""
    from megatron.core import parallel_state

    models = load(layout, directory, size)
    rows = {n: p.detach().float().numpy() for n, p in models.named_parameters() if p.shape[1:] == (32,) and len(p) > 24}
    rows = {n: v for n, v in rows.items() if n in ("embedding.word_embeddings.weight", "output_layer.weight")}
    config = models.mca_config
    return parallel_state.get_tensor_model_parallel_rank(), config.vocab_size, config.hf_config, rows


def save_grown(layout: dict[str, Any], directory: Path, size: int, target: Path) -> None:
    load(layout, directory, size).save_pretrained(target)


def export_grown(layout: dict[str, Any], directory: Path, size: int, target: Path) -> None:
    load(layout, directory, size).save_pretrained_as_hf(target)


def tied_weights_are_one(directory: Path) -> bool:
    """On one rank the output layer of a tied model reads the embedding."""
    (model,) = load({}, directory, NEW)
    return model.shared_embedding_or_output_weight() is model.embedding.word_embeddings.weight
