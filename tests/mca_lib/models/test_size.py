"""Parameters counted from the tables are those of the models that are built."""

from typing import Any

import pytest

from mca_lib.models import size
from mca_lib.models.layout import Layout
from mca_lib.models.registry import config_from_hf
from tests.mca_lib.models import size_ranks
from tests.mca_lib.models.layouts import LAYOUTS
from tests.mca_lib.tiny_models import VARIANTS, hf_config

LLAMA_3_1_8B = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_total_is_transformers_count(variant: str) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    hf = hf_config(variant)
    with torch.device("meta"):
        expected = AutoModelForCausalLM.from_config(hf).num_parameters()
    config = config_from_hf(hf.to_dict())
    assert size.total(config) == expected + config_extra(config)


def config_extra(config: Any) -> int:
    """What transformers does not count: multi-token prediction, and the experts' biases, which are buffers."""
    biases = len(config.moe.layers) * config.moe.num_experts if config.moe and config.moe.expert_bias else 0
    return size.parts(config)["mtp"] + biases


def test_parts_of_a_published_model() -> None:
    config = config_from_hf(LLAMA_3_1_8B)
    counts = size.parts(config)
    assert size.total(config) == size.active(config) == 8_030_261_248
    assert counts["embedding"] == counts["head"] == 128256 * 4096
    assert counts["attention"] == 32 * (4096 * 4096 * 2 + 4096 * 1024 * 2)
    assert counts["mlp"] == 32 * 3 * 4096 * 14336
    assert counts["norms"] == 65 * 4096


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rank_holds_what_the_table_says(ranks: Any, layout: str) -> None:
    world_size, sizes = LAYOUTS[layout]
    variants = size_ranks.variants_at(sizes)
    for held in ranks(world_size, size_ranks.held, sizes, variants):
        for variant, (place, built) in held.items():
            config = config_from_hf(hf_config(variant).to_dict())
            assert sum(size.local_parts(config, Layout(**sizes), *place).values()) == built, variant
