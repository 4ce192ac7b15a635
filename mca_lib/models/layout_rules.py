"""Can a model be laid out so? Asked before anything is allocated; the answer names the recipe's field. No torch."""

from mca_lib.errors import ConfigError
from mca_lib.models.config import LongRope, McaModelConfig
from mca_lib.models.hybrid.pattern import ATTENTION, LATENT, SYMBOLS
from mca_lib.models.layout import ParallelSizes, expert_tensor_size, too_small
from mca_lib.models.pipeline import Chunk, pipeline_chunks


def check_config_layout(config: McaModelConfig, parallel: ParallelSizes) -> None:
    """Raises ConfigError when the model cannot be laid out so, naming the field and what of the model it contradicts.

    The vocabulary is no part of it: it is padded to a multiple of the ranks that share it.
    """
    for problem in too_small(parallel):
        raise ConfigError(problem)
    _check_tensor(config, parallel)
    _check_experts(config, parallel)
    _check_linear_attention(config, parallel)
    if config.hybrid is not None:
        _check_layers(config, config.hybrid.pattern)
        _check_mamba(config, parallel)
    _check_long_rope(config, parallel)
    chunks = chunks_of(config, parallel)
    if config.vision is not None and config.vision.deepstack_layers > len(chunks[0][0].layers):
        raise ConfigError(
            f"parallel.pipeline={parallel.pipeline}: the first chunk would hold {len(chunks[0][0].layers)} layers, and "
            f"features of images are added after the model's first {config.vision.deepstack_layers} (deepstack); use "
            "fewer chunks, or set parallel.first_stage_layers"
        )
    if config.tie_word_embeddings and config.mtp_num_layers and parallel.pipeline > 1:
        # The last stage would have the tied matrix twice, as its embedding and as its output layer.
        raise ConfigError(
            f"parallel.pipeline={parallel.pipeline}: a model with tied embeddings and multi-token prediction layers "
            "cannot be split into stages; use 1"
        )


def _check_long_rope(config: McaModelConfig, parallel: ParallelSizes) -> None:
    """Context parallelism pads documents, and none may become long by that."""
    if not isinstance(config.rope_scaling, LongRope) or parallel.context == 1:
        return
    length = config.rope_scaling.original_max_position_embeddings
    if length % (2 * parallel.context):
        raise ConfigError(
            f"parallel.context={parallel.context}: documents are padded to multiples of {2 * parallel.context} tokens; "
            f"where LongRoPE's frequencies change must be one too: original_max_position_embeddings={length}"
        )


def chunks_of(config: McaModelConfig, parallel: ParallelSizes) -> tuple[tuple[Chunk, ...], ...]:
    """The chunks of each pipeline rank. Raises ConfigError naming the recipe's fields that do not fit the model."""
    pattern = config.hybrid.pattern if config.hybrid is not None else None
    return pipeline_chunks(config.num_layers, config.mtp_num_layers, parallel, pattern)


def check_training_layout(config: McaModelConfig, parallel: ParallelSizes) -> None:
    """`check_config_layout`, and what Megatron asks for in training alone."""
    check_config_layout(config, parallel)
    if config.moe is not None and parallel.tensor > 1 and not parallel.sequence_parallel:
        raise ConfigError(
            f"parallel.tensor={parallel.tensor} with experts needs parallel.sequence_parallel: true in training"
        )


def _check_tensor(config: McaModelConfig, parallel: ParallelSizes) -> None:
    tp, heads, groups = parallel.tensor, config.num_attention_heads, config.num_query_groups
    if heads % tp:
        raise ConfigError(
            f"parallel.tensor={tp} does not divide the model's {heads} attention heads; use one of {_fitting(config)}"
        )
    if not _key_value_heads_fit(config, tp):
        raise ConfigError(
            f"parallel.tensor={tp} does not fit the model's {groups} key/value heads; use one of {_fitting(config)}"
        )
    if config.qk_norm_over_heads and groups % tp:
        raise ConfigError(
            f"parallel.tensor={tp} does not divide the model's {groups} key/value heads, whose norm is over all of "
            f"them; use one of {_divisors(groups)}"
        )
    sizes = {"MLP size": config.ffn_hidden_size if config.dense_layers else None}
    if config.moe is not None:
        sizes["shared expert size"] = config.moe.shared_ffn_hidden_size
    if config.latent_attention is not None:
        sizes["query latent size"] = config.latent_attention.q_lora_rank
        sizes["key/value latent size"] = config.latent_attention.kv_down_size
    for name, size in sizes.items():
        if size is not None and size % tp:
            raise ConfigError(f"parallel.tensor={tp} does not divide the model's {name} {size}")
    if parallel.sequence_parallel and tp == 1:
        raise ConfigError("parallel.sequence_parallel needs parallel.tensor > 1; turn it off")


_NEEDS = {"G": "flash-linear-attention", "D": "Transformer Engine and fast-hadamard-transform"}
"""Layers that this package has no sizes and no weight table for → what Megatron (0.19.2) builds them with, on a GPU."""


def _check_layers(config: McaModelConfig, pattern: str) -> None:
    shown = f"hybrid_layer_pattern={pattern!r}"
    for symbol, packages in _NEEDS.items():
        if symbol in pattern:
            raise ConfigError(
                f"{shown}: {symbol} ({SYMBOLS[symbol]}) is not supported; Megatron builds it on a GPU alone, with "
                f"{packages}"
            )
    latent = config.latent_attention is not None
    if (foreign := ATTENTION if latent else LATENT) in pattern:
        has, fits = ("has", LATENT) if latent else ("has no", ATTENTION)
        raise ConfigError(f"{shown}: the model {has} latent attention; write {fits} for {foreign}")


def _check_mamba(config: McaModelConfig, parallel: ParallelSizes) -> None:
    """Each tensor parallel rank has whole groups of heads; context parallel ranks share its heads among themselves."""
    if config.hybrid.mamba is None:
        return
    mamba, tp, cp = config.hybrid.mamba, parallel.tensor, parallel.context
    if mamba.num_groups % tp:
        raise ConfigError(
            f"parallel.tensor={tp} does not divide the {mamba.num_groups} groups of the model's Mamba layers; use one "
            f"of {_divisors(mamba.num_groups)}, or make the hybrid with more groups (num_groups)"
        )
    heads, groups = mamba.num_heads // tp, mamba.num_groups // tp
    if heads % cp or (groups % cp and cp % groups):
        among = f" on each of parallel.tensor={tp} ranks" if tp > 1 else ""
        fitting = [d for d in _divisors(heads) if groups % d == 0 or d % groups == 0]
        raise ConfigError(
            f"parallel.context={cp} does not fit the {heads} heads in {groups} groups of a Mamba layer{among}; use one "
            f"of {fitting}"
        )


def _check_linear_attention(config: McaModelConfig, parallel: ParallelSizes) -> None:
    """Tensor parallel ranks share the key heads of a gated delta net, and context parallel ranks those of each."""
    net, ranks = config.gated_delta_net, parallel.tensor * parallel.context
    if net is None or not net.layers or net.num_key_heads % ranks == 0:
        return
    raise ConfigError(
        f"parallel.tensor={parallel.tensor} x parallel.context={parallel.context} does not divide the "
        f"{net.num_key_heads} key heads of the model's gated delta nets; use sizes whose product is one of "
        f"{_divisors(net.num_key_heads)}"
    )


def _check_experts(config: McaModelConfig, parallel: ParallelSizes) -> None:
    if config.moe is None:
        if parallel.expert > 1:
            raise ConfigError(f"parallel.expert={parallel.expert}: {config.described} has no experts; use 1")
        if parallel.expert_tensor not in (None, parallel.tensor):
            raise ConfigError(
                f"parallel.expert_tensor={parallel.expert_tensor}: {config.described} has no experts; leave it out"
            )
        return
    experts, size = config.moe.num_experts, config.moe.ffn_hidden_size
    if experts % parallel.expert:
        raise ConfigError(
            f"parallel.expert={parallel.expert} does not divide the model's {experts} experts; use one of "
            f"{_divisors(experts)}"
        )
    if config.moe.bias and expert_tensor_size(parallel) > 1:
        field = "tensor" if parallel.expert_tensor is None else "expert_tensor"
        raise ConfigError(
            f"parallel.{field}={expert_tensor_size(parallel)}: Megatron does not split experts with biases; set "
            "parallel.expert_tensor: 1"
        )
    if size % expert_tensor_size(parallel):
        name = "tensor" if parallel.expert_tensor is None else "expert_tensor"
        raise ConfigError(
            f"parallel.{name}={expert_tensor_size(parallel)} does not divide the model's expert size {size}; set "
            "parallel.expert_tensor"
        )


def _key_value_heads_fit(config: McaModelConfig, tp: int) -> bool:
    """Each rank has whole key/value heads, or several ranks share one and the fused rows still divide."""
    if config.latent_attention is not None:
        return True  # every head has a key of its own, made from the latent that all ranks hold
    groups = config.num_query_groups
    return groups % tp == 0 or (tp % groups == 0 and (config.gated_query_size + 2 * config.kv_size) % tp == 0)


def _fitting(config: McaModelConfig) -> list[int]:
    """Tensor parallel sizes that the attention heads allow."""
    return [d for d in _divisors(config.num_attention_heads) if _key_value_heads_fit(config, d)]


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]
