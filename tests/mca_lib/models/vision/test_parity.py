"""Vision-language models have transformers' losses and gradients, whoever encodes the images, and without any."""

from pathlib import Path
from typing import Any

import pytest

from tests.mca_lib.models.layouts import LAYOUTS
from tests.mca_lib.models.vision import vision_ranks

# As for models of text; the tower's gradients are summed over ranks that each have some of the images.
LOSS, GRADIENT = 1e-4, 1e-4
FAMILIES = ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"]


@pytest.fixture(scope="module")
def models(ranks: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("hf")
    ranks(1, vision_ranks.prepare, directory, FAMILIES)
    return directory


@pytest.mark.parametrize("layout", ["one rank", "TP2", "TP2 with sequence parallel", "PP2", "CP2"])
def test_losses_and_gradients_equal_transformers(ranks: Any, models: Path, layout: str) -> None:
    world_size, sizes = LAYOUTS[layout]
    # The tower, mRoPE and deepstack differ; what a layout does to them does not, but for the one with deepstack.
    families = FAMILIES if layout == "one rank" else ["qwen2_5_vl", "qwen3_vl"]
    check(ranks(world_size, vision_ranks.compare, models, families, sizes), families)


def test_gradients_are_the_same_with_activations_computed_again(ranks: Any, models: Path) -> None:
    check(ranks(2, vision_ranks.compare, models, ["qwen3_vl"], {"pipeline": 2}, "full"), ["qwen3_vl"])


def test_tensor_and_context_parallel_ranks_share_the_images(ranks: Any, models: Path) -> None:
    sizes = {"tensor": 2, "context": 2, "sequence_parallel": True}
    check(ranks(4, vision_ranks.compare, models, ["qwen3_vl"], sizes), ["qwen3_vl"])


_ROPE = "text_config.rope_parameters."
WRONG: dict[str, list[dict[str, Any]]] = {
    "qwen2_vl": [
        {_ROPE + "mrope_section": [2, 1, 1]},
        {"vision_config.hidden_act": "gelu"},
        {"vision_config.num_heads": 1},
    ],
    "qwen2_5_vl": [
        {"vision_config.window_size": 8},
        {"vision_config.fullatt_block_indexes": [2]},
        {"text_config.layer_types": ["full_attention"] * 4},
    ],
    "qwen3_vl": [
        {_ROPE + "mrope_section": [3, 2, 1]},
        {"vision_config.deepstack_visual_indexes": [1, 2]},
        {"text_config.rms_norm_eps": 1e-1},
    ],
}
"""Fields of config.json that are not those of the weights' model."""


@pytest.mark.parametrize("family", WRONG)
def test_a_wrong_field_shows(ranks: Any, models: Path, tmp_path: Path, family: str) -> None:
    (found,) = ranks(1, vision_ranks.losses_of_changed, models / family, tmp_path, [{}, *WRONG[family]])
    right, *wrong = found
    assert right <= LOSS
    assert min(wrong) > 10 * LOSS, dict(zip(map(str, WRONG[family]), wrong, strict=True))


def test_frequencies_stay_fp32_in_bf16(ranks: Any, models: Path) -> None:
    """As in transformers; rounded to bf16 a large position would be off by a part of a turn."""
    dtypes = ranks(1, vision_ranks.dtypes_in_bf16, models / "qwen2_5_vl")[0]
    fp32 = {name.rpartition(".")[2] for name, dtype in dtypes.items() if dtype == "float32"}
    assert fp32 == {"inv_freq", "original_inv_freq"}
    assert "bfloat16" in dtypes.values()


def test_the_vocabulary_grows_with_its_tokenizer(ranks: Any, models: Path, tmp_path: Path) -> None:
    """Under the names of transformers 4, and in a config of two parts."""
    assert ranks(1, vision_ranks.grown, models / "qwen2_vl", tmp_path / "out", 1040) == [(1040, [1040, 32], 1039)]


def check(reports: list[dict[str, Any]], families: list[str]) -> None:
    for family in families:
        errors = [report[family] for report in reports]
        assert max(e.loss for e in errors) <= LOSS, (family, errors)
        assert max(e.gradient for e in errors) <= GRADIENT, (family, errors)
        assert any(e.loss > 0 for e in errors), (family, errors)
        assert all(e.parameters > 0 for e in errors), (family, errors)
