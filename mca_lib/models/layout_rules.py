"""Can a model be laid out so? Asked before anything is allocated; the answer names the recipe's field. No torch."""

from mca_lib.errors import ConfigError
from mca_lib.models.config import McaModelConfig
from mca_lib.models.layout import ParallelSizes, expert_tensor_size, too_small
from mca_lib.models.pipeline import pipeline_chunks


def check_config_layout(config: McaModelConfig, parallel: ParallelSizes) -> None:
    """Raises ConfigError when the model cannot be laid out so, naming the field and what of the model it contradicts.

    The vocabulary is no part of it: it is padded to a multiple of the ranks that share it.
    """
    for problem in too_small(parallel):
        raise ConfigError(problem)
    _check_tensor(config, parallel)
    _check_experts(config, parallel)
    pipeline_chunks(config.num_layers, config.mtp_num_layers, parallel)
    if config.tie_word_embeddings and config.mtp_num_layers and parallel.pipeline > 1:
        # The last stage would have the tied matrix twice, as its embedding and as its output layer.
        raise ConfigError(
            f"parallel.pipeline={parallel.pipeline}: a model with tied embeddings and multi-token prediction layers "
            "cannot be split into stages; use 1"
        )


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


def _check_experts(config: McaModelConfig, parallel: ParallelSizes) -> None:
    if config.moe is None:
        if parallel.expert > 1:
            raise ConfigError(f"parallel.expert={parallel.expert}: a {config.model_type} model has no experts; use 1")
        if parallel.expert_tensor not in (None, parallel.tensor):
            raise ConfigError(
                f"parallel.expert_tensor={parallel.expert_tensor}: a {config.model_type} model has no experts; "
                "leave it out"
            )
        return
    experts, size = config.moe.num_experts, config.moe.ffn_hidden_size
    if experts % parallel.expert:
        raise ConfigError(
            f"parallel.expert={parallel.expert} does not divide the model's {experts} experts; use one of "
            f"{_divisors(experts)}"
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
    return groups % tp == 0 or (tp % groups == 0 and (config.query_size + 2 * config.kv_size) % tp == 0)


def _fitting(config: McaModelConfig) -> list[int]:
    """Tensor parallel sizes that the attention heads allow."""
    return [d for d in _divisors(config.num_attention_heads) if _key_value_heads_fit(config, d)]


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]
