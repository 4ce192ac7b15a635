"""Which modules a transformer layer is made of.

Two layers with one checkpoint: Transformer Engine's where it can be imported and a GPU is there, else Megatron's
local layer with the norm and the core attention of this package. The Transformer Engine layer is Megatron's own
specification, all but unchanged; it has not been run by this project's tests, which know no GPU.
"""

from dataclasses import replace
from functools import partial

from megatron.core.models.backends import BackendSpecProvider
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.multi_token_prediction import (
    MultiTokenPredictionBlockSubmodules,
    get_mtp_layer_spec,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from mca_lib.errors import ConfigError
from mca_lib.models.attention import SDPACoreAttention
from mca_lib.models.biased_experts import ExpertRowParallelLinear
from mca_lib.models.config import McaModelConfig
from mca_lib.models.latent_attention import LatentSelfAttention
from mca_lib.models.naming import fused_names
from mca_lib.models.norm import RMSNorm
from mca_lib.models.post_norm import PostNormLayer
from mca_lib.models.router import RowMoELayer, RowRouter
from mca_lib.models.self_attention import HeadsNormSelfAttention, TwoRopesSelfAttention
from mca_lib.models.vision.deepstack import DeepStackLayer
from mca_lib.platforms import uses_transformer_engine


def block_spec(
    config: McaModelConfig, megatron: TransformerConfig, vp_stage: int | None
) -> TransformerBlockSubmodules | ModuleSpec:
    """Specification of the layers that this rank's model chunk holds, and of the norm after the last one."""
    layers = get_num_layers_to_build(megatron, vp_stage)
    first = get_transformer_layer_offset(megatron, vp_stage)
    kinds = [(i in config.moe_layers, i in config.linear_attention_layers) for i in range(config.num_layers)]
    spec_of = {kind: layer_spec(config, *kind) for kind in set(kinds)}
    if uses_transformer_engine() and len(spec_of) == 1:
        return spec_of[kinds[0]]
    return TransformerBlockSubmodules(
        layer_specs=[spec_of[kind] for kind in kinds[first : first + layers]], layer_norm=_norm()
    )


def mtp_spec(config: McaModelConfig) -> MultiTokenPredictionBlockSubmodules | None:
    """Specification of the multi-token prediction layers; None: the model has none.

    Each has softmax attention, and experts where the last layer has them.
    """
    if not config.mtp_num_layers:
        return None
    inner = layer_spec(config, has_experts=config.num_layers - 1 in config.moe_layers)
    spec = get_mtp_layer_spec(inner, use_transformer_engine=uses_transformer_engine())
    if not uses_transformer_engine():
        spec.submodules.enorm = spec.submodules.hnorm = spec.submodules.layer_norm = RMSNorm
    return MultiTokenPredictionBlockSubmodules(layer_specs=[spec] * config.mtp_num_layers)


def layer_spec(config: McaModelConfig, has_experts: bool, linear_attention: bool = False) -> ModuleSpec:
    """Specification of one layer: with experts or a dense MLP, with softmax attention or a gated delta net."""
    spec = (_engine_layer_spec if uses_transformer_engine() else _local_layer_spec)(config, has_experts)
    if config.attention_output_bias:
        attention = spec.submodules.self_attention.submodules
        attention.linear_proj = with_bias(attention.linear_proj)
    if config.qk_norm_over_heads:
        spec.submodules.self_attention.module = HeadsNormSelfAttention
    if config.sliding_rotary_base is not None:
        spec.submodules.self_attention.module = TwoRopesSelfAttention
    if linear_attention:
        spec.submodules.self_attention = _gated_delta_net()
        spec.submodules.sharded_state_dict_keys_map = dict(fused_names(config, has_experts, linear_attention=True))
    if config.post_norms:
        spec.module, spec.params = PostNormLayer, {"post_norm": _norm()}
    if config.vision is not None and config.vision.deepstack_layers:
        spec.module = DeepStackLayer
    if config.mlp_bias and not has_experts:
        mlp = spec.submodules.mlp.keywords["submodules"]
        mlp.linear_fc1, mlp.linear_fc2 = with_bias(mlp.linear_fc1), with_bias(mlp.linear_fc2)
    if has_experts:
        parts = replace(spec.submodules.mlp.keywords["submodules"], router=RowRouter)
        if config.moe.bias and not uses_transformer_engine():
            parts.experts.keywords["submodules"].linear_fc2 = ExpertRowParallelLinear
        spec.submodules.mlp = partial(RowMoELayer, submodules=parts)
    return spec


def _gated_delta_net() -> ModuleSpec:
    from mca_lib.models.linear_attention.gated_delta_net import gated_delta_net_spec

    if not uses_transformer_engine():
        return gated_delta_net_spec(ColumnParallelLinear, RowParallelLinear)
    backend = _engine_backend()
    return gated_delta_net_spec(backend.column_parallel_layer_norm_linear(), backend.row_parallel_linear())


def _norm() -> type:
    """Class of a norm that is a module of its own."""
    return _engine_backend().layer_norm() if uses_transformer_engine() else RMSNorm


def _engine_backend() -> BackendSpecProvider:
    from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider

    return TESpecProvider()


def _engine_layer_spec(config: McaModelConfig, has_experts: bool) -> ModuleSpec:
    spec = get_gpt_layer_with_transformer_engine_spec(
        num_experts=config.moe.num_experts if has_experts else None,
        moe_grouped_gemm=has_experts,
        qk_layernorm=config.qk_layernorm or config.latent_attention is not None,
        multi_latent_attention=config.latent_attention is not None,
    )
    if not config.pre_norms:  # parts of the linear layers behind them, there
        plain = _engine_backend().column_parallel_linear()
        spec.submodules.self_attention.submodules.linear_qkv = plain
        spec.submodules.pre_mlp_layernorm = IdentityOp
        if not has_experts:
            spec.submodules.mlp.keywords["submodules"].linear_fc1 = plain
    if config.latent_attention is not None:
        _check_latent_norms(config)
        # Split as in the local layer, so that a rank's share does not depend on the implementation.
        attention = spec.submodules.self_attention.submodules
        spec.submodules.self_attention.module = LatentSelfAttention
        attention.linear_q_down_proj = attention.linear_kv_down_proj = _engine_backend().column_parallel_linear()
    return spec


def _local_layer_spec(config: McaModelConfig, has_experts: bool) -> ModuleSpec:
    latent = config.latent_attention
    spec = get_gpt_layer_local_spec(
        num_experts=config.moe.num_experts if has_experts else None,
        qk_layernorm=config.qk_layernorm or latent is not None,
        multi_latent_attention=latent is not None,
        normalization="RMSNorm",
    )
    layer = spec.submodules
    layer.input_layernorm = layer.pre_mlp_layernorm = RMSNorm if config.pre_norms else IdentityOp
    # Megatron has one map for all of its local layers, which renames the norm before experts too.
    layer.sharded_state_dict_keys_map = dict(fused_names(config, has_experts))
    attention = layer.self_attention.submodules
    attention.core_attention = SDPACoreAttention
    if latent is not None:
        layer.self_attention.module = LatentSelfAttention
        attention.kv_layernorm = partial(latent_norm, latent.norm_epsilon)
        attention.q_layernorm = attention.kv_layernorm if latent.has_q_lora else IdentityOp
    elif config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    return spec


def latent_norm(epsilon: float, config: TransformerConfig, hidden_size: int, eps: float) -> RMSNorm:
    """Norm of a latent, with its own epsilon in place of the layer's, which Megatron passes."""
    return RMSNorm(config, hidden_size, epsilon)


def _check_latent_norms(config: McaModelConfig) -> None:
    if config.norm_epsilon != config.latent_attention.norm_epsilon:
        raise ConfigError(
            f"rms_norm_eps={config.norm_epsilon} differs from the latents' {config.latent_attention.norm_epsilon}: "
            "Transformer Engine's fused layer has one epsilon; run without Transformer Engine"
        )


def with_bias(linear: type) -> type:
    """A parallel linear layer that has a bias although the model's other linear layers have none.

    Megatron has one switch, `add_bias_linear`, for the attention output and the MLP together.
    """

    class WithBias(linear):
        def __init__(self, *args: object, bias: bool = True, **kwargs: object) -> None:
            super().__init__(*args, bias=True, **kwargs)

    WithBias.__name__ = WithBias.__qualname__ = linear.__name__
    return WithBias
