"""`McaModelConfig` (what the model is) × arguments (how it runs) → Megatron's `TransformerConfig`."""

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig

from mca_lib.errors import ConfigError
from mca_lib.models.config import McaModelConfig
from mca_lib.models.registry import Layout, check_config_layout
from mca_lib.parallel import DistributingParallelArguments, pipeline_communication
from mca_lib.platforms import current_platform


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
            is one rank in fp32.
        use_cpu_initialization: make the weights on the CPU; None does so where there is no accelerator.
        perform_initialization: draw random weights; false leaves them unset, for a checkpoint to fill.

    Raises:
        ConfigError: the model cannot be laid out so.
    """
    layout = Layout.from_args(args)
    check_config_layout(config, layout)
    dtype = params_dtype(args)
    on_cpu = current_platform().device_type == "cpu"
    recompute = getattr(args, "recompute_granularity", None)
    recompute = None if recompute == "none" else recompute
    return TransformerConfig(
        # the model
        num_layers=config.num_layers,
        hidden_size=config.hidden_size,
        ffn_hidden_size=config.ffn_hidden_size,
        num_attention_heads=config.num_attention_heads,
        num_query_groups=config.num_query_groups,
        kv_channels=config.kv_channels,
        normalization="RMSNorm",
        layernorm_epsilon=config.norm_epsilon,
        qk_layernorm=config.qk_layernorm,
        add_bias_linear=False,
        add_qkv_bias=config.qkv_bias,
        gated_linear_unit=True,
        activation_func=F.silu,
        attention_dropout=config.attention_dropout,
        hidden_dropout=0.0,
        init_method_std=config.initializer_range,
        # the layout
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        virtual_pipeline_model_parallel_size=virtual_stages(layout),
        context_parallel_size=layout.context,
        expert_model_parallel_size=layout.expert,
        sequence_parallel=layout.sequence_parallel,
        **pipeline_communication(args if args is not None else DistributingParallelArguments()),
        # the arithmetic
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        fp16=dtype == torch.float16,
        attention_softmax_in_fp32=True,
        # Megatron's fused kernels are torch.compile'd functions that need a C++ compiler on CPU.
        bias_activation_fusion=not on_cpu,
        use_cpu_initialization=on_cpu if use_cpu_initialization is None else use_cpu_initialization,
        perform_initialization=perform_initialization,
        recompute_granularity=recompute,
        recompute_method="uniform" if recompute == "full" else None,
        recompute_num_layers=1 if recompute == "full" else None,
    )


def params_dtype(args: object | None) -> torch.dtype:
    """Dtype of the weights that `bf16`/`fp16` of the arguments ask for."""
    bf16, fp16 = bool(getattr(args, "bf16", False)), bool(getattr(args, "fp16", False))
    if bf16 and fp16:
        raise ConfigError("bf16 and fp16 are both set; choose one")
    return torch.bfloat16 if bf16 else torch.float16 if fp16 else torch.float32


def virtual_stages(layout: Layout) -> int | None:
    """Model chunks per pipeline rank, None for one."""
    return layout.virtual_pipeline if layout.virtual_pipeline and layout.virtual_pipeline > 1 else None
