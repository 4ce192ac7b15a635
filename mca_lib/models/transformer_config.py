"""`McaModelConfig` (what the model is) × arguments (how it runs) → Megatron's `TransformerConfig`."""

import math
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.activations import squared_relu
from megatron.core.fusions.fused_bias_geglu import quick_gelu
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from mca_lib.errors import ConfigError
from mca_lib.models.config import McaModelConfig, YarnRope
from mca_lib.models.layout import Layout, expert_tensor_size, virtual_stages
from mca_lib.models.layout_rules import check_config_layout, chunks_of
from mca_lib.models.pipeline import hybrid_split, megatron_split
from mca_lib.models.registry import check_config
from mca_lib.models.rotary import attention_factor
from mca_lib.models.training_rules import check_training_options
from mca_lib.parallel import DistributingParallelArguments, pipeline_communication
from mca_lib.platforms import current_platform, uses_transformer_engine

# Megatron's `fast_gelu` is the same with roundings to bf16 in between.
_ACTIVATIONS = {
    "swiglu": F.silu,
    "geglu": partial(F.gelu, approximate="tanh"),
    "quick_geglu": quick_gelu,
    "relu2": squared_relu,
}
_FUSED = ("swiglu", "quick_geglu")
"""Of these Megatron (0.19.2) has a kernel together with the bias. It refuses relu², and knows no gelu but `F.gelu`."""


def transformer_config(
    config: McaModelConfig,
    args: object | None = None,
    *,
    use_cpu_initialization: bool | None = None,
    perform_initialization: bool = True,
) -> TransformerConfig:
    """Megatron's config for one rank.

    Args:
        args: training arguments: the parallel sizes, `bf16`/`fp16`, and where present `recompute_granularity`; None
            is one rank in fp32. Where present, `mtp_loss_weight`, and `moe_aux_loss_coeff`, `moe_z_loss_coeff` and
            `moe_router_bias_update_rate`, which balance the load of experts in training.
        use_cpu_initialization: make the weights on the CPU; None does so where there is no accelerator.
        perform_initialization: draw random weights; false leaves them unset, for a checkpoint to fill.

    Raises:
        ModelError: the config's family cannot have the value of a field.
        ConfigError: the model cannot be laid out so.
    """
    layout = Layout.from_args(args)
    check_config(config)
    check_config_layout(config, layout)
    if hasattr(args, "moe_aux_loss_coeff"):
        check_training_options(config, args)
    dtype = params_dtype(args)
    on_cpu = current_platform().device_type == "cpu"
    recompute = getattr(args, "recompute_granularity", None)
    recompute = None if recompute == "none" else recompute
    kind = TransformerConfig if config.latent_attention is None else MLATransformerConfig
    megatron = kind(
        # the model
        num_layers=config.num_layers,
        hidden_size=config.hidden_size,
        ffn_hidden_size=config.ffn_hidden_size,
        num_attention_heads=config.num_attention_heads,
        num_query_groups=config.num_query_groups,
        kv_channels=config.kv_channels,
        normalization="RMSNorm",
        layernorm_epsilon=config.norm_epsilon,
        layernorm_zero_centered_gamma=config.zero_centered_norms,
        qk_layernorm=config.qk_layernorm or config.latent_attention is not None,
        add_bias_linear=config.moe is not None and config.moe.bias,
        add_qkv_bias=config.qkv_bias,
        attention_output_gate=config.attention_output_gate,
        gated_linear_unit=config.gated,
        activation_func=_ACTIVATIONS[config.activation],
        activation_func_clamp_value=config.activation_clamp,
        glu_linear_offset=config.glu_linear_offset,
        softmax_type="learnable" if config.attention_sinks else "vanilla",
        attention_dropout=config.attention_dropout,
        softmax_scale=_softmax_scale(config),
        **_window(config),
        hidden_dropout=config.residual_dropout,
        init_method_std=config.initializer_range,
        mtp_num_layers=config.mtp_num_layers or None,
        mtp_loss_scaling_factor=getattr(args, "mtp_loss_weight", 0.1),
        **_latent_attention(config),
        **_experts(config, args),
        **_linear_attention(config),
        **_mamba(config),
        # the layout
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        virtual_pipeline_model_parallel_size=virtual_stages(layout),
        **(megatron_split(layout) if config.hybrid is None else hybrid_split(chunks_of(config, layout))),
        context_parallel_size=layout.context,
        expert_model_parallel_size=layout.expert,
        expert_tensor_parallel_size=expert_tensor_size(layout),
        sequence_parallel=layout.sequence_parallel,
        **pipeline_communication(args if args is not None else DistributingParallelArguments()),
        # the arithmetic
        transformer_impl="transformer_engine" if uses_transformer_engine() else "local",
        # Losses are summed over tokens and divided once per step; the router and MTP read this when they are built.
        calculate_per_token_loss=True,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        fp16=dtype == torch.float16,
        fp8=getattr(args, "fp8", None),
        # Scaled by the tensor itself: there is no history that a checkpoint would have to keep.
        fp8_recipe="tensorwise",
        attention_softmax_in_fp32=True,
        # Megatron's fused kernels are torch.compile'd functions that need a C++ compiler on CPU.
        bias_activation_fusion=not on_cpu and config.activation in _FUSED,
        use_cpu_initialization=on_cpu if use_cpu_initialization is None else use_cpu_initialization,
        perform_initialization=perform_initialization,
        recompute_granularity=recompute,
        recompute_method="uniform" if recompute == "full" else None,
        recompute_num_layers=1 if recompute == "full" else None,
    )
    _set_rotary_factor(megatron, config)
    return megatron


def _softmax_scale(config: McaModelConfig) -> float | None:
    """What scores are multiplied with; None: 1 / √head size.

    YaRN's factor of cos and sin is here, squared: the same, and known to every kernel.

    Transformer Engine's fused rope has no such factor, and leaves it out of packed rows without a word.
    """
    factor = attention_factor(config.rope_scaling)
    if config.latent_attention is not None or config.rotary_channels is not None:
        factor = 1  # it has another place there
    if factor == 1 and config.query_pre_attn_scalar is None:
        return None
    return factor**2 / math.sqrt(config.query_pre_attn_scalar or config.kv_channels)


def _set_rotary_factor(megatron: TransformerConfig, config: McaModelConfig) -> None:
    """The factor of cos and sin where a part of a head rotates, so that no factor on the scores does the same.

    Megatron's attention reads it from the attributes of YaRN, which are no fields of its config:
    0.1 x mscale x ln(scaling factor) + 1.
    """
    factor = attention_factor(config.rope_scaling)
    if factor != 1 and config.rotary_channels is not None:
        megatron.yarn_rotary_scaling_factor = math.e
        megatron.yarn_mscale, megatron.yarn_mscale_all_dim = 10 * (factor - 1), 0.0


def _window(config: McaModelConfig) -> dict[str, Any]:
    """A sliding window as Megatron counts it: tokens to the left of the query, and 1 for a layer that has it."""
    if config.sliding_window is None:
        return {}
    windowed = [int(i not in config.full_attention_layers) for i in range(config.num_layers)]
    return {
        "window_size": (config.sliding_window - 1, 0),
        "window_attn_skip_freq": windowed if config.full_attention_layers else None,
    }


def _latent_attention(config: McaModelConfig) -> dict[str, Any]:
    """Fields of multi-head latent attention, which has its own rotary embedding."""
    latent = config.latent_attention
    if latent is None:
        return {}
    fields = {
        "q_lora_rank": latent.q_lora_rank,
        "kv_lora_rank": latent.kv_lora_rank,
        "qk_head_dim": latent.qk_nope_head_dim,
        "qk_pos_emb_head_dim": latent.qk_rope_head_dim,
        "v_head_dim": latent.v_head_dim,
        "rotary_base": config.rotary_base,
    }
    rope = config.rope_scaling
    if rope is None:
        return {**fields, "rope_type": "rope", "rotary_scaling_factor": 1.0}
    assert isinstance(rope, YarnRope), rope
    return {
        **fields,
        "rope_type": "yarn",
        "rotary_scaling_factor": rope.factor,
        "original_max_position_embeddings": rope.original_max_position_embeddings,
        "beta_fast": rope.beta_fast,
        "beta_slow": rope.beta_slow,
        "mscale": _mscale(rope),
        "mscale_all_dim": rope.mscale_all_dim or 0.0,
    }


def _mscale(rope: YarnRope) -> float:
    """Megatron's `mscale` that gives cos and sin the factor that transformers gives them.

    Both scale the softmax by the square of m(mscale_all_dim), with m(x) = 0.1 x ln(factor) + 1. Megatron multiplies cos
    and sin by m(mscale) / m(mscale_all_dim).
    """
    growth = 0.1 * math.log(rope.factor)
    if growth <= 0:
        return 1.0
    return (attention_factor(rope) * (growth * (rope.mscale_all_dim or 0.0) + 1) - 1) / growth


def _linear_attention(config: McaModelConfig) -> dict[str, Any]:
    """Fields of gated delta nets; Megatron counts 1 for a layer that has one."""
    net = config.gated_delta_net
    if net is None or not net.layers:
        return {}
    return {
        "experimental_attention_variant": "gated_delta_net",
        "linear_attention_freq": [int(i in net.layers) for i in range(config.num_layers)],
        "linear_conv_kernel_dim": net.conv_kernel,
        "linear_key_head_dim": net.key_head_dim,
        "linear_value_head_dim": net.value_head_dim,
        "linear_num_key_heads": net.num_key_heads,
        "linear_num_value_heads": net.num_value_heads,
    }


def _experts(config: McaModelConfig, args: object | None) -> dict[str, Any]:
    """Fields of a mixture of experts. No token is dropped and no load balanced unless training asks for it."""
    moe = config.moe
    if moe is None:
        return {}
    aux_loss = getattr(args, "moe_aux_loss_coeff", 0.0)
    limited = moe.group_topk is not None and moe.group_topk < moe.num_groups
    return {
        "num_moe_experts": moe.num_experts,
        "moe_ffn_hidden_size": moe.ffn_hidden_size,
        "moe_layer_freq": 1 if config.stacked_layers else [int(i in moe.layers) for i in range(config.num_layers)],
        "moe_router_topk": moe.topk,
        "moe_router_score_function": moe.score_function,
        # Softmax over the chosen experts alone is the softmax over all, divided by the sum of the chosen.
        "moe_router_pre_softmax": moe.score_function == "softmax" and not moe.normalize_topk,
        "moe_router_num_groups": moe.num_groups if limited else None,
        "moe_router_group_topk": moe.group_topk if limited else None,
        "moe_router_topk_scaling_factor": None if moe.scaling_factor == 1 else moe.scaling_factor,
        "moe_router_enable_expert_bias": moe.expert_bias,
        "moe_router_bias_update_rate": getattr(args, "moe_router_bias_update_rate", 0.0),
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "aux_loss" if aux_loss else "none",
        "moe_aux_loss_coeff": aux_loss,
        "moe_z_loss_coeff": getattr(args, "moe_z_loss_coeff", 0.0) or None,
        "moe_shared_expert_intermediate_size": moe.shared_ffn_hidden_size,
        "moe_shared_expert_gate": moe.shared_gate,
        "moe_token_dispatcher_type": "alltoall",
        "moe_grouped_gemm": uses_transformer_engine(),
    }


def _mamba(config: McaModelConfig) -> dict[str, Any]:
    """Fields of a hybrid model. Megatron's layers take the rest of a Mamba layer's sizes from their specification."""
    if config.hybrid is None:
        return {}
    mamba = config.hybrid.mamba
    sizes = (
        {}
        if mamba is None
        else {
            "mamba_num_heads": mamba.num_heads,
            "mamba_head_dim": mamba.head_dim,
            "mamba_state_dim": mamba.state_size,
            "mamba_num_groups": mamba.num_groups,
        }
    )
    return {"is_hybrid_model": True, **sizes}


def params_dtype(args: object | None) -> torch.dtype:
    """Dtype of the weights that `bf16`/`fp16` of the arguments ask for."""
    bf16, fp16 = bool(getattr(args, "bf16", False)), bool(getattr(args, "fp16", False))
    if bf16 and fp16:
        raise ConfigError("bf16 and fp16 are both set; choose one")
    return torch.bfloat16 if bf16 else torch.float16 if fp16 else torch.float32
