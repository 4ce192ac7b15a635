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


def stored_copies(source: Path, exported: Path) -> dict[str, tuple[str, bool, int]]:
    """Name of a stored copy → (what it is a copy of, is it that in the exported directory, rows)."""
    from safetensors.torch import load_file

    from mca_lib.converter.hf_source import HfSource
    from mca_lib.converter.plan import make_plan
    from mca_lib.models.config import McaModelConfig

    tensors = load_file(exported / "model.safetensors")
    with HfSource(source) as stored:
        copies = make_plan(McaModelConfig.from_pretrained(source), stored.tensors).copies
    return {n: (of, bool((tensors[n] == tensors[of]).all()), len(tensors[n])) for n, of in copies.items()}


def tied_weights_are_one(directory: Path) -> bool:
    """On one rank the output layer of a tied model reads the embedding."""
    (model,) = load({}, directory, NEW)
    return model.shared_embedding_or_output_weight() is model.embedding.word_embeddings.weight


def make_source(directory: Path, variant: str) -> int:
    """A Hugging Face directory whose tokenizer has more tokens than the model; returns how many rows they need."""
    from transformers import AutoTokenizer

    from mca_lib.tokenizer import tokenizer_size
    from tests.mca_lib.converter import export_ranks

    export_ranks.make_source(directory, variant, "float32")
    tokenizer = AutoTokenizer.from_pretrained(directory)
    words = [f"<word {i}>" for i in range(OLD + 30 - len(tokenizer))]
    # One that the text of the comparison has, so that the sample holds an id without a row.
    tokenizer.add_tokens([*words, "harbour"])
    tokenizer.save_pretrained(directory)
    return tokenizer_size(tokenizer)


def convert(source: Path, target: Path, resize: bool) -> dict[str, Any]:
    from mca_lib.converter.jobs import convert as job

    spec = {"model": str(source), "output": str(target), "max_logits_difference": 1e-3, "resize_vocabulary": resize}
    return job(spec, lambda done, total, **_: None)


def grown_by_transformers(directory: Path, size: int) -> dict[str, Any]:
    """Name in the checkpoint → rows of transformers' model after `grow_transformers`."""
    from transformers import AutoModelForCausalLM

    from mca_lib.models.vocabulary import grow_transformers

    model = AutoModelForCausalLM.from_pretrained(directory)
    grow_transformers(model, size)
    assert model.config.vocab_size == size
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert tied == model.config.tie_word_embeddings
    rows = {"embedding.word_embeddings.weight": model.get_input_embeddings().weight}
    rows |= {} if tied else {"output_layer.weight": model.get_output_embeddings().weight}
    return {name: weight.detach().numpy() for name, weight in rows.items()}
