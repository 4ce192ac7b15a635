"""Weights that training leaves as they are, named by the Hugging Face modules that they belong to.

    embed_tokens      every module of this name
    layers.0          all of a layer: names are matched by whole parts between dots, at their ends
    model.layers      all layers, by their full name
    transformer       of a hybrid, all but its Mamba layers

Which weights these are is read off the family's weight table. No torch at import.
"""

import difflib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from mca_lib.converter.plan import Entry, entries
from mca_lib.errors import ConfigError
from mca_lib.models.config import McaModelConfig
from mca_lib.models.naming import MIXER

if TYPE_CHECKING:
    from mca_lib.models.language_model import McaLanguageModel


TRANSFORMER = "transformer"


def frozen_weights(config: McaModelConfig, freeze: Sequence[str]) -> frozenset[str]:
    """Names in the checkpoint of the weights that the names in `freeze` stand for.

    Raises:
        ConfigError: a name is none of the model's, parts what Megatron holds as one weight, or all is frozen.
    """
    table = list(entries(replace(config, source_prefixes={})))
    if TRANSFORMER in freeze and not config.mamba_layers:
        raise ConfigError(
            f"training.freeze: {TRANSFORMER} is all of a hybrid but its Mamba layers, and this model has none; leave "
            "it out"
        )
    for name in (name for name in freeze if name != TRANSFORMER):
        if not any(_belongs(weight, name) for entry in table for weight in entry.hf):
            raise ConfigError(f"training.freeze: no module of the model is called {name!r}; {_hint(table, name)}")
    frozen = set()
    for entry in table:
        chosen = [any(_belongs(weight, name) for name in freeze) for weight in entry.hf]
        if all(chosen) or (TRANSFORMER in freeze and MIXER not in entry.mca):
            frozen.add(entry.mca)
        elif any(chosen):
            parts = ", ".join(weight.removesuffix(".weight").rpartition(".")[2] for weight in entry.hf)
            raise ConfigError(
                f"training.freeze: {entry.hf[chosen.index(True)]} is a part of one weight in Megatron; name all of "
                f"{parts}, or none"
            )
    if len(frozen) == len(table):
        raise ConfigError(f"training.freeze: {', '.join(freeze)} is the whole model, and leaves nothing to train")
    return frozenset(frozen)


def freeze_weights(chunks: Sequence["McaLanguageModel"], freeze: Sequence[str]) -> bool:
    """Turn the gradients of these weights off, before gradient buffers are made. Is there a weight left in each chunk?

    Raises ConfigError as `frozen_weights`.
    """
    from mca_lib.models.naming import checkpoint_parameters
    from mca_lib.models.router import RowRouter

    names = frozen_weights(chunks[0].mca_config, freeze)
    for chunk in chunks:
        biases = {id(m.expert_bias): m for m in chunk.modules() if isinstance(m, RowRouter)}
        for name, weight in checkpoint_parameters(chunk):
            if name in names and id(weight) in biases:
                biases[id(weight)].frozen_expert_bias = True
            elif name in names:
                weight.requires_grad_(False)
        if chunk.pre_process:
            let_gradients_through(chunk)
    return all(any(weight.requires_grad for weight in chunk.parameters()) for chunk in chunks)


def let_gradients_through(chunk: "McaLanguageModel") -> None:
    """Behind a frozen embedding, too: a layer whose activations are computed again is skipped in the backward pass
    unless its input has a gradient."""
    chunk.embedding.register_forward_hook(lambda _, __, output: output.requires_grad_())


def _belongs(weight: str, name: str) -> bool:
    """Does the tensor `weight` belong to a module whose name is `name` or ends with it?"""
    return any(module == name or module.endswith(f".{name}") for module in _modules(weight))


def _modules(weight: str) -> Iterator[str]:
    """model.layers.0.mlp.gate.weight → model, model.layers, …, model.layers.0.mlp.gate."""
    parts = weight.split(".")
    yield from (".".join(parts[:end]) for end in range(1, len(parts)))


def _hint(table: Sequence[Entry], name: str) -> str:
    modules = dict.fromkeys(module for entry in table for weight in entry.hf for module in _modules(weight))
    ends = dict.fromkeys(end for module in modules for end in (module, module.rpartition(".")[2]) if not end.isdigit())
    if near := difflib.get_close_matches(name, ends):
        return f"did you mean {', '.join(near)}?"
    return f"some are {', '.join([end for end in ends if '.' not in end][:12])}"
