"""A field of config.json that is not that of the weights' model shows in the logits: each family's own fields."""

from pathlib import Path
from typing import Any

import pytest

from tests.mca_lib.models import parity_ranks, peculiar_ranks
from tests.mca_lib.models.test_parity import LOGITS
from tests.mca_lib.tiny_models import VARIANTS, YARN_ROPE

LONG = VARIANTS["phi3-longrope"]["rope_parameters"]
CHANGES: dict[str, list[dict[str, Any]]] = {
    "seed-oss": [{"rms_norm_eps": 1e-1}, {"rope_parameters": {"rope_type": "default", "rope_theta": 99.0}}],
    "phi3-longrope": [
        {"sliding_window": 8},
        {"original_max_position_embeddings": 24, "rope_parameters": LONG},
        {"rope_parameters": LONG | {"long_factor": [1.5, 2.5, 6.1]}},
        {"rope_parameters": LONG | {"attention_factor": 1.01}},
    ],
    "glm4-moe": [
        {"rope_parameters": YARN_ROPE | {"partial_rotary_factor": 0.75}},
        {"routed_scaling_factor": 1.1},
        {"n_group": 1, "topk_group": 1},
    ],
    "minimax-m2": [{"rope_parameters": YARN_ROPE | {"partial_rotary_factor": 0.75}}, {"num_experts_per_tok": 2}],
    "qwen3.5": [
        {"rope_parameters": VARIANTS["qwen3.5"]["rope_parameters"] | {"partial_rotary_factor": 0.5}},
        {"linear_num_key_heads": 8, "linear_key_head_dim": 3},  # weights of the same shapes
    ],
    "qwen3-next": [{"norm_topk_prob": False}, {"num_experts_per_tok": 3}, {"rms_norm_eps": 1e-2}],
}


@pytest.mark.parametrize("variant", CHANGES)
def test_a_wrong_field_shows(ranks: Any, tmp_path: Path, variant: str) -> None:
    ranks(1, parity_ranks.prepare, tmp_path, [variant])
    (errors,) = ranks(1, peculiar_ranks.errors_of_changed, tmp_path / variant, variant, [{}, *CHANGES[variant]])
    right, *wrong = errors
    assert right <= LOGITS
    assert min(wrong) > 10 * LOGITS, dict(zip(map(str, CHANGES[variant]), wrong, strict=True))
