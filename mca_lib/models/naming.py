"""Names of parameters, from a model chunk's own to the checkpoint's.

A chunk counts its layers from 0 and, with the local layer, keeps a norm as a module of its own. The checkpoint counts
layers over the whole model and uses the names of Transformer Engine's fused layer; a tied output layer is the
embedding. Those names are the left column of the weight tables.
"""

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from mca_lib.models.gpt import McaGPTModel

LAYER = re.compile(r"^decoder\.layers\.(\d+)\.")

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


def stacked_key(name: str) -> tuple[str, int | None]:
    """Key and index in a torch_dist checkpoint, where the layers of a model are one tensor with a leading axis."""
    match = LAYER.match(name)
    return (f"decoder.layers.{name[match.end() :]}", int(match[1])) if match else (name, None)
