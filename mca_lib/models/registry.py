"""The supported model types, and the two questions that preflight asks. No torch, no Megatron: milliseconds.

check_hf_config(config.json as a dict)             is this model one that converts faithfully?
check_layout(config.json as a dict, parallel)      can it be laid out like that?
"""

import difflib
from typing import Any

from mca_lib.errors import ConfigError, ModelError
from mca_lib.models.config import McaModelConfig
from mca_lib.models.config_checks import foreign_to_exported_code
from mca_lib.models.families import (
    deepseek_v3,
    gemma3_text,
    glm4_moe,
    gpt_oss,
    llama,
    mcaflow_hybrid,
    minimax_m2,
    mistral,
    mixtral,
    nemotron_h,
    olmo2,
    phi3,
    qwen2,
    qwen2_5_vl,
    qwen2_moe,
    qwen2_vl,
    qwen3,
    qwen3_5,
    qwen3_5_moe,
    qwen3_moe,
    qwen3_next,
    qwen3_vl,
    seed_oss,
)
from mca_lib.models.families.base import Family
from mca_lib.models.layout import ParallelSizes
from mca_lib.models.layout_rules import check_training_layout

FAMILIES: dict[str, Family] = {
    m.FAMILY.model_type: m.FAMILY
    for m in (
        deepseek_v3,
        gemma3_text,
        glm4_moe,
        gpt_oss,
        llama,
        minimax_m2,
        mistral,
        mixtral,
        nemotron_h,
        olmo2,
        phi3,
        qwen2,
        qwen2_5_vl,
        qwen2_moe,
        qwen2_vl,
        qwen3,
        qwen3_5,
        qwen3_5_moe,
        qwen3_moe,
        qwen3_next,
        qwen3_vl,
        seed_oss,
    )
}
"""Model types of transformers."""
SUPPORTED_MODEL_TYPES = (*FAMILIES, mcaflow_hybrid.MODEL_TYPE)


def family_of(model_type: object) -> Family:
    """Raises ModelError for a model type without a family."""
    if model_type is not None and not isinstance(model_type, str):
        raise ModelError(f"config.json: model_type={model_type!r:.80} must be a text")
    if model_type in FAMILIES:
        return FAMILIES[model_type]
    if model_type == mcaflow_hybrid.MODEL_TYPE:
        return mcaflow_hybrid.FAMILY
    if not model_type:
        raise ModelError(f"config.json: model_type is missing; supported: {', '.join(SUPPORTED_MODEL_TYPES)}")
    near = difflib.get_close_matches(model_type, SUPPORTED_MODEL_TYPES, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise ModelError(
        f"config.json: model_type={model_type!r} is not supported; {hint}supported: {', '.join(SUPPORTED_MODEL_TYPES)}"
    )


def weights_family(config: McaModelConfig) -> Family:
    """Whose weight table has all weights of this model: that of its checkpoint, and of what an export writes.

    A hybrid that started from a transformer is exported as that again, unless it has layers that the transformer lacks.
    """
    own = family_of(config.model_type)
    fresh = config.mamba_layers and not own.hybrid
    # The code of exported hybrids has no latent attention: one that has it is trained from scratch.
    return mcaflow_hybrid.FAMILY if fresh and config.latent_attention is None else own


def config_from_hf(hf: dict[str, Any]) -> McaModelConfig:
    """Hugging Face config → `McaModelConfig`. Raises ModelError naming the field that cannot be carried over."""
    return family_of(hf.get("model_type")).config_from_hf(hf)


def check_hf_config(hf: dict[str, Any]) -> None:
    """Raises ModelError naming the field of config.json that this project cannot carry over faithfully."""
    config_from_hf(hf)


def check_config(config: McaModelConfig) -> None:
    """Raises ModelError naming the field whose value the config's family cannot have."""
    family = family_of(config.model_type)
    family.check(config if family.hybrid else config.transformer)


def check_hybrid_export(config: McaModelConfig, field: str) -> None:
    """Raises ConfigError, naming `field`, for a hybrid that the code of exported hybrids cannot run."""
    if weights_family(config).model_type != mcaflow_hybrid.MODEL_TYPE:
        return
    if (foreign := foreign_to_exported_code(config)) is not None:
        raise ConfigError(f"{field}: {config.described} cannot become a hybrid with Mamba layers: it has {foreign}")
    try:
        mcaflow_hybrid.FAMILY.config_to_hf(mcaflow_hybrid.exported_config(config))
    except ModelError as error:
        raise ConfigError(f"{field}: a transformer of this kind cannot become a hybrid: {error}") from None


def check_layout(hf: dict[str, Any], parallel: ParallelSizes) -> None:
    """Raises ConfigError when the model of this Hugging Face config cannot be trained so, naming both sides."""
    check_training_layout(config_from_hf(hf), parallel)
