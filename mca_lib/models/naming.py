"""Names of parameters, from a model chunk's own to the checkpoint's.

A chunk counts its layers from 0 and, with the local layer, keeps a norm as a module of its own. The checkpoint counts
layers over the whole model and uses the names of Transformer Engine's fused layer; a tied output layer is the
embedding. Those names are the left column of the weight tables.
"""

import itertools
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from mca_lib.models.gpt import McaGPTModel

LAYER = re.compile(r"^decoder\.layers\.(\d+)\.")
EXPERT = re.compile(r"\.experts\.experts\.(\d+)\.")
EXPERTS = ".experts.experts."

# As in `sharded_state_dict_keys_map` of Megatron's local layer specification.
_FUSED_NAMES = (
    (".input_layernorm.", ".self_attention.linear_qkv.layer_norm_"),
    (".pre_mlp_layernorm.", ".mlp.linear_fc1.layer_norm_"),
)


def checkpoint_parameters(model: "McaGPTModel") -> Iterator[tuple[str, "torch.nn.Parameter"]]:
    """(name in the checkpoint, parameter) of one model chunk."""
    for name, parameter in model.named_parameters():
        if match := LAYER.match(name):
            layer = model.decoder.layers[int(match[1])].layer_number - 1
            name = f"decoder.layers.{layer}.{name[match.end() :]}"
            for own, fused in _FUSED_NAMES:
                name = name.replace(own, fused)
        elif name == "output_layer.weight" and model.mca_config.tie_word_embeddings:
            name = "embedding.word_embeddings.weight"
        yield name, parameter


def stored_key(name: str, stacked_layers: bool) -> tuple[str, tuple[int, ...]]:
    """Key of a torch_dist checkpoint for a tensor, and its index on the key's leading axes.

    The experts of a layer are one stored tensor with a leading axis. So are the layers, where all are alike
    (`McaModelConfig.stacked_layers`); else each has keys of its own.
    """
    index = []
    if stacked_layers and (match := LAYER.match(name)):
        index.append(int(match[1]))
        name = f"decoder.layers.{name[match.end() :]}"
    if match := EXPERT.search(name):
        index.append(int(match[1]))
        name = f"{name[: match.start()]}{EXPERTS}{name[match.end() :]}"
    return name, tuple(index)


def written_out(key: str, shape: tuple[int, ...]) -> Iterator[tuple[str, tuple[int, ...], tuple[int, ...]]]:
    """(name, index, shape without the leading axes) of every tensor of a stored key; inverse of `stored_key`."""
    template, axes = key, 0
    if key.startswith("decoder.layers.") and not LAYER.match(key):
        template = "decoder.layers.{}." + key.removeprefix("decoder.layers.")
        axes += 1
    if EXPERTS in key:
        template = template.replace(EXPERTS, EXPERTS + "{}.")
        axes += 1
    for index in itertools.product(*(range(n) for n in shape[:axes])):
        yield template.format(*index), index, shape[axes:]
