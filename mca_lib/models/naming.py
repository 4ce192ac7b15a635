"""Names of parameters, from a model chunk's own to the checkpoint's.

A chunk counts its layers from 0 and, with the local layer, keeps a norm as a module of its own. The checkpoint counts
layers and experts over the whole model and uses the names of Transformer Engine's fused layer; a tied output layer is
the embedding. Those names are the left column of the weight tables.
"""

import itertools
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from mca_lib.models.config import McaModelConfig
    from mca_lib.models.language_model import McaLanguageModel

LAYER = re.compile(r"^decoder\.layers\.(\d+)\.")
EXPERT = re.compile(r"\.experts\.experts\.(\d+)\.")
EXPERTS = ".experts.experts."
_MTP_LAYER = re.compile(r"^mtp\.layers\.(\d+)\.mtp_model_layer\.")

_EXPERT_IN_LAYER = re.compile(
    r"^mlp\.experts\.(?:local_experts\.(\d+)\.(linear_fc[12]\..+)|(linear_fc[12]\.(?:weight|bias))(\d+))$"
)
"""An expert of the local layer, which is a module, or of Transformer Engine's, where all are one module."""

MIXER = ".mixer."
"""What the names of all weights of a Mamba layer contain."""
MAMBA_NORM = ("norm.", "mixer.in_proj.layer_norm_")
"""(prefix in a local Mamba layer, prefix in the checkpoint); as `fused_names`."""
_MAMBA_NAMES = (MAMBA_NORM, ("mixer.conv1d_", "mixer.conv1d."))


def fused_names(
    config: "McaModelConfig", has_experts: bool, linear_attention: bool = False
) -> tuple[tuple[str, str], ...]:
    """(prefix in the local layer, prefix in the checkpoint): a norm before a linear layer is a part of that."""
    if config.latent_attention is not None:
        attention = (
            ("self_attention.q_layernorm.", "self_attention.linear_q_up_proj.layer_norm_"),
            ("self_attention.kv_layernorm.", "self_attention.linear_kv_up_proj.layer_norm_"),
        )
    elif linear_attention:
        attention = (("input_layernorm.", "self_attention.in_proj.layer_norm_"),)
    else:
        attention = (("input_layernorm.", "self_attention.linear_qkv.layer_norm_"),)
    return attention if has_experts else (*attention, ("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_"))


def expert_in_layer(name: str) -> tuple[int, str] | None:
    """(number of the expert, name within it) for a name within a layer of Megatron; None for what is no expert's."""
    if (match := _EXPERT_IN_LAYER.match(name)) is None:
        return None
    return int(match[1] or match[4]), match[2] or match[3]


def expert_name(number: int, rest: str) -> str:
    """Name within a layer of the checkpoint; `number` is that of the whole model's expert."""
    return f"mlp.experts.experts.{number}.{rest}"


def checkpoint_parameters(model: "McaLanguageModel") -> Iterator[tuple[str, "torch.Tensor"]]:
    """(name in the checkpoint, tensor) of one model chunk: parameters, and buffers that are weights (expert biases).

    Adapters are no part of the model's checkpoint.
    """
    config = model.mca_config
    buffers = ((n, b) for n, b in model.named_buffers() if n.endswith(".expert_bias"))
    for name, tensor in itertools.chain(model.named_parameters(), buffers):
        if name.startswith("adapters."):
            continue
        if match := LAYER.match(name):
            layer = model.decoder.layers[int(match[1])]
            number = layer.layer_number - 1
            linear = number in config.linear_attention_layers
            name = f"decoder.layers.{number}.{_layer_name(name[match.end() :], layer, config, number, linear)}"
        elif match := _MTP_LAYER.match(name):
            layer = model.mtp.layers[int(match[1])].mtp_model_layer
            rest = _layer_name(name[match.end() :], layer, config, config.num_layers - 1, linear_attention=False)
            name = f"mtp.layers.{match[1]}.transformer_layer.{rest}"
        elif name == "output_layer.weight" and config.tie_word_embeddings:
            name = "embedding.word_embeddings.weight"
        yield name, tensor


def _layer_name(
    name: str, layer: "torch.nn.Module", config: "McaModelConfig", number: int, linear_attention: bool
) -> str:
    """Name within a layer of the checkpoint, for one within a chunk's layer that is of the kind of layer `number`."""
    if found := expert_in_layer(name):
        number, rest = found
        return expert_name(layer.mlp.local_expert_indices[number], rest)
    renamed = fused_names(config, number in config.moe_layers, linear_attention)
    for own, fused in _MAMBA_NAMES if number in config.mamba_layers else renamed:
        if name.startswith(own):
            return fused + name.removeprefix(own)
    return name


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
