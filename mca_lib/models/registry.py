"""The supported model types, and the two questions that preflight asks. No torch, no Megatron: milliseconds.

check_hf_config(config.json as a dict)             is this model one that converts faithfully?
check_layout(config.json as a dict, parallel)      can it be laid out like that?
"""

import difflib
from dataclasses import dataclass
from typing import Any, Protocol

from mca_lib.errors import ConfigError, ModelError
from mca_lib.models.config import McaModelConfig
from mca_lib.models.families import llama, qwen2, qwen3
from mca_lib.models.families.base import Family

FAMILIES: dict[str, Family] = {m.FAMILY.model_type: m.FAMILY for m in (llama, qwen2, qwen3)}
SUPPORTED_MODEL_TYPES = tuple(FAMILIES)


class ParallelSizes(Protocol):
    """The recipe's `parallel` section, or a `Layout`."""

    tensor: int
    pipeline: int
    virtual_pipeline: int | None
    context: int
    expert: int
    expert_tensor: int | None
    sequence_parallel: bool
    first_stage_layers: int | None
    last_stage_layers: int | None
    pipeline_layout: str | None


@dataclass(frozen=True)
class Layout:
    """Parallel sizes under the recipe's names."""

    tensor: int = 1
    pipeline: int = 1
    virtual_pipeline: int | None = None
    context: int = 1
    expert: int = 1
    expert_tensor: int | None = None
    """Ranks that share each expert; None: as many as share the other weights."""
    sequence_parallel: bool = False
    first_stage_layers: int | None = None
    last_stage_layers: int | None = None
    """Layers of the first and last pipeline rank; None: an equal share of what is left."""
    pipeline_layout: str | None = None
    """What each stage holds, in Megatron's notation."""

    @classmethod
    def from_args(cls, args: object | None) -> "Layout":
        """From training arguments under Megatron's names; None is one rank."""
        if args is None:
            return cls()
        return cls(
            tensor=args.tensor_model_parallel_size,
            pipeline=args.pipeline_model_parallel_size,
            virtual_pipeline=args.virtual_pipeline_model_parallel_size,
            context=args.context_parallel_size,
            expert=args.expert_model_parallel_size,
            expert_tensor=args.expert_tensor_parallel_size,
            sequence_parallel=args.sequence_parallel,
            first_stage_layers=args.num_layers_in_first_pipeline_stage,
            last_stage_layers=args.num_layers_in_last_pipeline_stage,
            pipeline_layout=args.pipeline_model_parallel_layout,
        )


def family_of(model_type: object) -> Family:
    """Raises ModelError for a model type without a family."""
    if model_type is not None and not isinstance(model_type, str):
        raise ModelError(f"config.json: model_type={model_type!r:.80} must be a text")
    if model_type in FAMILIES:
        return FAMILIES[model_type]
    if not model_type:
        raise ModelError(f"config.json: model_type is missing; supported: {', '.join(SUPPORTED_MODEL_TYPES)}")
    near = difflib.get_close_matches(model_type, FAMILIES, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise ModelError(
        f"config.json: model_type={model_type!r} is not supported; {hint}supported: {', '.join(SUPPORTED_MODEL_TYPES)}"
    )


def config_from_hf(hf: dict[str, Any]) -> McaModelConfig:
    """Hugging Face config → `McaModelConfig`. Raises ModelError naming the field that cannot be carried over."""
    return family_of(hf.get("model_type")).config_from_hf(hf)


def check_hf_config(hf: dict[str, Any]) -> None:
    """Raises ModelError naming the field of config.json that this project cannot carry over faithfully."""
    config_from_hf(hf)


def check_layout(hf: dict[str, Any], parallel: ParallelSizes) -> None:
    """Raises ConfigError when the model of this Hugging Face config cannot be laid out so, naming both sides."""
    check_config_layout(config_from_hf(hf), parallel)


def check_config_layout(config: McaModelConfig, parallel: ParallelSizes) -> None:
    """`check_layout` for a config that is already read."""
    tp, pp, vpp = parallel.tensor, parallel.pipeline, parallel.virtual_pipeline
    heads, groups, layers = config.num_attention_heads, config.num_query_groups, config.num_layers
    if heads % tp:
        raise ConfigError(
            f"parallel.tensor={tp} does not divide the model's {heads} attention heads; use one of {_fitting(config)}"
        )
    if not _key_value_heads_fit(config, tp):
        raise ConfigError(
            f"parallel.tensor={tp} does not fit the model's {groups} key/value heads; use one of {_fitting(config)}"
        )
    if config.ffn_hidden_size % tp:
        raise ConfigError(f"parallel.tensor={tp} does not divide the model's MLP size {config.ffn_hidden_size}")
    if parallel.sequence_parallel and tp == 1:
        raise ConfigError("parallel.sequence_parallel needs parallel.tensor > 1; turn it off")
    if vpp is not None and vpp > 1 and pp == 1:
        raise ConfigError(f"parallel.virtual_pipeline={vpp} needs parallel.pipeline > 1")
    stages = pp * (vpp or 1)
    if layers % stages:
        name = "parallel.pipeline" if stages == pp else "parallel.pipeline x parallel.virtual_pipeline"
        raise ConfigError(
            f"{name}={stages} does not divide the model's {layers} layers; use one of {_divisors(layers)}"
        )
    if parallel.expert > 1:
        raise ConfigError(f"parallel.expert={parallel.expert}: a {config.model_type} model has no experts; use 1")


def _key_value_heads_fit(config: McaModelConfig, tp: int) -> bool:
    """Each rank has whole key/value heads, or several ranks share one and the fused rows still divide."""
    groups = config.num_query_groups
    return groups % tp == 0 or (tp % groups == 0 and (config.query_size + 2 * config.kv_size) % tp == 0)


def _fitting(config: McaModelConfig) -> list[int]:
    """Tensor parallel sizes that the attention heads allow."""
    return [d for d in _divisors(config.num_attention_heads) if _key_value_heads_fit(config, d)]


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]
