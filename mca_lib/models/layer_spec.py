"""Which modules a transformer layer is made of.

Two layers with one checkpoint: Transformer Engine's where it can be imported and a GPU is there, else Megatron's
local layer with the norm and the core attention of this package. The Transformer Engine layer is Megatron's own
specification, unchanged; it has not been run by this project's tests, which know no GPU.
"""

import importlib.util

import torch
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig

from mca_lib.models.attention import SDPACoreAttention
from mca_lib.models.config import McaModelConfig
from mca_lib.models.norm import RMSNorm


def uses_transformer_engine() -> bool:
    """Is there a GPU, and Transformer Engine to drive it?"""
    return torch.cuda.is_available() and importlib.util.find_spec("transformer_engine") is not None


def block_spec(
    config: McaModelConfig, megatron: TransformerConfig, vp_stage: int | None
) -> TransformerBlockSubmodules | ModuleSpec:
    """Specification of the layers that this rank's model chunk holds, and of the norm after the last one."""
    layer = layer_spec(config)
    if uses_transformer_engine():
        return layer
    layers = get_num_layers_to_build(megatron, vp_stage)
    return TransformerBlockSubmodules(layer_specs=[layer] * layers, layer_norm=RMSNorm)


def layer_spec(config: McaModelConfig) -> ModuleSpec:
    """Specification of one layer, the same for all layers."""
    if uses_transformer_engine():
        spec = get_gpt_layer_with_transformer_engine_spec(qk_layernorm=config.qk_layernorm)
    else:
        spec = _local_layer_spec(config)
    if config.attention_output_bias:
        attention = spec.submodules.self_attention.submodules
        attention.linear_proj = with_bias(attention.linear_proj)
    return spec


def _local_layer_spec(config: McaModelConfig) -> ModuleSpec:
    spec = get_gpt_layer_local_spec(qk_layernorm=config.qk_layernorm, normalization="RMSNorm")
    layer = spec.submodules
    layer.input_layernorm = layer.pre_mlp_layernorm = RMSNorm
    attention = layer.self_attention.submodules
    attention.core_attention = SDPACoreAttention
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    return spec


def with_bias(linear: type) -> type:
    """A parallel linear layer that has a bias although the model's other linear layers have none.

    Megatron has one switch, `add_bias_linear`, for the attention output and the MLP together.
    """

    class WithBias(linear):
        def __init__(self, *args: object, bias: bool = True, **kwargs: object) -> None:
            super().__init__(*args, bias=True, **kwargs)

    WithBias.__name__ = WithBias.__qualname__ = linear.__name__
    return WithBias
