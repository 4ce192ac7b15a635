"""Which modules the layers of a hybrid are made of.

An attention layer and an MLP layer are the two halves of a transformer layer (`mca_lib.models.layer_spec`), so each
switch of a family is in one place. A Mamba layer is Megatron's own. As for transformers there are two kinds with one
checkpoint: Transformer Engine's, which no test here has run, and the local one.
"""

from dataclasses import replace
from typing import Any

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import TransformerLayerSubmodules

from mca_lib.models.config import McaModelConfig
from mca_lib.models.config_parts import Mamba2
from mca_lib.models.hybrid.reference_kernels import install_reference_kernels
from mca_lib.models.layer_spec import layer_spec
from mca_lib.models.naming import MAMBA_NORM
from mca_lib.models.norm import RMSNorm
from mca_lib.platforms import uses_transformer_engine


class LocalHybridStack(HybridStack):
    """Megatron's stack, whose last norm is always Transformer Engine's (megatron-core 0.19.2), with ours."""

    def __init__(self, *args: Any, post_layer_norm: bool = True, **kwargs: Any) -> None:
        super().__init__(*args, post_layer_norm=False, **kwargs)
        self.post_layer_norm = post_layer_norm
        if self.post_process and post_layer_norm:
            self.final_norm = RMSNorm(self.config, self.config.hidden_size, self.config.layernorm_epsilon)


def stack_spec(config: McaModelConfig) -> ModuleSpec:
    """Specification of the stack of layers, for every symbol of the model's pattern."""
    attention = _attention_half(layer_spec(config, has_experts=False))
    layers = HybridStackSubmodules(
        attention_layer=attention,
        mla_layer=attention,
        mlp_layer=_mlp_half(layer_spec(config, has_experts=False)),
    )
    if config.moe is not None:
        layers.moe_layer = _mlp_half(layer_spec(config, has_experts=True))
    if config.hybrid.mamba is not None:
        layers.mamba_layer = _mamba_layer(config.hybrid.mamba)
    return ModuleSpec(module=HybridStack if uses_transformer_engine() else LocalHybridStack, submodules=layers)


def _attention_half(layer: ModuleSpec) -> ModuleSpec:
    """The layer without its MLP."""
    whole = layer.submodules
    half = TransformerLayerSubmodules(
        input_layernorm=whole.input_layernorm,
        self_attention=whole.self_attention,
        self_attn_bda=whole.self_attn_bda,
        sharded_state_dict_keys_map=whole.sharded_state_dict_keys_map,
    )
    return replace(layer, submodules=half)


def _mlp_half(layer: ModuleSpec) -> ModuleSpec:
    """The layer without its attention."""
    whole = layer.submodules
    half = TransformerLayerSubmodules(
        pre_mlp_layernorm=whole.pre_mlp_layernorm,
        mlp=whole.mlp,
        mlp_bda=whole.mlp_bda,
        sharded_state_dict_keys_map=whole.sharded_state_dict_keys_map,
    )
    return replace(layer, submodules=half)


def _mamba_layer(mamba: Mamba2) -> ModuleSpec:
    install_reference_kernels()
    from megatron.core.ssm.mamba_mixer import MambaMixer, MambaMixerSubmodules  # looks for the kernels, once

    sizes = {"d_conv": mamba.conv_kernel, "chunk_size": mamba.chunk_size}
    if uses_transformer_engine():
        from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec

        layer = hybrid_stack_spec.submodules.mamba_layer
        mixer = replace(layer.submodules.mixer, params=sizes)
        return replace(layer, submodules=replace(layer.submodules, mixer=mixer))
    projections = MambaMixerSubmodules(in_proj=ColumnParallelLinear, out_proj=RowParallelLinear)
    return ModuleSpec(
        module=MambaLayer,
        submodules=MambaLayerSubmodules(
            norm=RMSNorm,
            mixer=ModuleSpec(module=MambaMixer, params=sizes, submodules=projections),
            mamba_bda=get_bias_dropout_add,
            sharded_state_dict_keys_map=dict([MAMBA_NORM]),
        ),
    )
