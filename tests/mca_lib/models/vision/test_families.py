"""Configs of vision-language models are read as transformers reads them, and written as they came."""

from dataclasses import replace
from typing import Any

import pytest

from mca_lib.converter.plan import TensorInfo, entries, make_plan
from mca_lib.errors import ConfigError, ModelError
from mca_lib.models import size
from mca_lib.models.config import McaModelConfig
from mca_lib.models.families.vision import FLAT_NAMES
from mca_lib.models.layout import Layout
from mca_lib.models.layout_rules import check_config_layout
from mca_lib.models.registry import config_from_hf, family_of
from mca_lib.verification.tiny import tiny_config

# As published, up to fields that say nothing of the model.
QWEN2_VL_2B: dict[str, Any] = {
    "architectures": ["Qwen2VLForConditionalGeneration"],
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "vision_start_token_id": 151652,
    "vision_end_token_id": 151653,
    "vision_token_id": 151654,
    "image_token_id": 151655,
    "video_token_id": 151656,
    "hidden_act": "silu",
    "hidden_size": 1536,
    "initializer_range": 0.02,
    "intermediate_size": 8960,
    "max_position_embeddings": 32768,
    "max_window_layers": 28,
    "model_type": "qwen2_vl",
    "num_attention_heads": 12,
    "num_hidden_layers": 28,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vision_config": {
        "depth": 32,
        "embed_dim": 1280,
        "mlp_ratio": 4,
        "num_heads": 16,
        "in_chans": 3,
        "hidden_size": 1536,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "spatial_patch_size": 14,
        "temporal_patch_size": 2,
    },
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    "vocab_size": 151936,
}
QWEN3_VL_4B: dict[str, Any] = {
    "architectures": ["Qwen3VLForConditionalGeneration"],
    "image_token_id": 151655,
    "model_type": "qwen3_vl",
    "text_config": {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 151643,
        "dtype": "bfloat16",
        "eos_token_id": 151645,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 2560,
        "initializer_range": 0.02,
        "intermediate_size": 9728,
        "max_position_embeddings": 262144,
        "model_type": "qwen3_vl_text",
        "num_attention_heads": 32,
        "num_hidden_layers": 36,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-06,
        "rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"},
        "rope_theta": 5000000,
        "tie_word_embeddings": True,
        "use_cache": True,
        "vocab_size": 151936,
    },
    "tie_word_embeddings": True,
    "video_token_id": 151656,
    "vision_config": {
        "deepstack_visual_indexes": [5, 11, 17],
        "depth": 24,
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_size": 1024,
        "in_channels": 3,
        "initializer_range": 0.02,
        "intermediate_size": 4096,
        "model_type": "qwen3_vl",
        "num_heads": 16,
        "num_position_embeddings": 2304,
        "out_hidden_size": 2560,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    },
    "vision_end_token_id": 151653,
    "vision_start_token_id": 151652,
}
TINY = {name: tiny_config(name) for name in ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")}
CONFIGS = {"Qwen2-VL-2B": QWEN2_VL_2B, "Qwen3-VL-4B": QWEN3_VL_4B, **TINY}


def written_by_transformers(hf: dict[str, Any]) -> dict[str, Any]:
    from transformers import AutoConfig

    return AutoConfig.for_model(**hf).to_dict()


@pytest.mark.parametrize("name", CONFIGS)
def test_config_goes_back_as_it_came(name: str) -> None:
    hf = {**CONFIGS[name], "my_own_key": [1, 2]}
    config = config_from_hf(hf)
    assert family_of(config.model_type).config_to_hf(config) == hf | {
        "architectures": [family_of(config.model_type).architecture]
    }
    assert McaModelConfig.from_dict(config.to_dict()) == config


@pytest.mark.parametrize("name", CONFIGS)
def test_what_transformers_writes_means_the_same(name: str) -> None:
    """It writes every field, nested, with its own defaults."""
    config = config_from_hf(CONFIGS[name])
    again = config_from_hf(written_by_transformers(CONFIGS[name]))
    tower = again.vision.tower | config.vision.tower
    assert replace(again, hf_config={}, vision=replace(again.vision, tower={})) == replace(
        config, hf_config={}, vision=replace(config.vision, tower={})
    )
    assert family_of(config.model_type).mappings(config) == family_of(config.model_type).mappings(
        replace(config, vision=replace(config.vision, tower=tower))
    )


@pytest.mark.parametrize("name", CONFIGS)
def test_a_new_config_is_written_as_transformers_reads_it(name: str) -> None:
    config = replace(config_from_hf(CONFIGS[name]), hf_config={})
    hf = written_by_transformers(family_of(config.model_type).config_to_hf(config, transformers=5))
    again = config_from_hf(hf)
    assert replace(again, hf_config={}, vision=config.vision) == config
    assert again.vision.mrope_section == config.vision.mrope_section


def test_a_published_model_has_its_published_size() -> None:
    assert size.total(config_from_hf(QWEN2_VL_2B)) == 2_208_985_600


def test_interleaved_sections_are_those_of_transformers() -> None:
    """24 of time, of which the last 4 lie behind the others: t h w ... t h w t t t t."""
    axes = config_from_hf(QWEN3_VL_4B).vision.axes(64)
    assert (axes[:6], axes[57:], [axes.count(a) for a in range(3)]) == (
        [0, 1, 2, 0, 1, 2],
        [0, 1, 2, 0, 0, 0, 0],
        [24, 20, 20],
    )


@pytest.mark.parametrize("name", TINY)
def test_weights_have_the_names_of_either_release(name: str) -> None:
    """And an export those of its source."""
    config = config_from_hf(TINY[name])
    for prefixes in ({}, FLAT_NAMES):
        source = {
            n: TensorInfo(shape, "float32")
            for entry in entries(replace(config, source_prefixes=prefixes))
            for n, shape in zip(entry.hf, entry.mapping.hf_shapes(config), strict=True)
        }
        assert any(n.startswith("visual.") for n in source) == bool(prefixes)
        plan = make_plan(config, source)
        assert {n for entry in entries(plan.config(config)) for n in entry.hf} == source.keys()


WRONG = [
    ({"text_config": None}, "text_config is missing"),
    ({"vision_config": None}, "vision_config=None must be an object"),
    ({"image_token_id": "x"}, "image_token_id='x' must be an integer"),
    ({"vision_config.out_hidden_size": 99}, "features of 99 channels"),
    ({"vision_config.num_heads": 5}, "5 heads do not divide 24"),
    ({"vision_config.depth": 0}, "vision_config.depth=0"),
    ({"vision_config.deepstack_visual_indexes": [0] * 9}, "has 9 entries"),
    ({"vision_config.deepstack_visual_indexes": None}, "deepstack_visual_indexes=None must be a list"),
    ({"text_config.hidden_act": "gelu"}, "hidden_act='gelu' is not supported"),
    ({"text_config.rope_parameters.mrope_section": [3, 2, 2]}, "adds up to 7"),
    ({"text_config.rope_parameters.mrope_interleaved": False}, "mrope_interleaved=False"),
]


@pytest.mark.parametrize(("change", "message"), WRONG, ids=[message for _, message in WRONG])
def test_what_cannot_be_carried_over_is_refused_by_name(change: dict[str, Any], message: str) -> None:
    import copy

    hf = copy.deepcopy(TINY["qwen3_vl"])
    for path, value in change.items():
        *parts, last = path.split(".")
        place = hf
        for part in parts:
            place = place[part]
        place[last] = value
    with pytest.raises(ModelError, match=message):
        config_from_hf(hf)


def test_deepstack_layers_must_lie_in_the_first_chunk() -> None:
    config = config_from_hf(TINY["qwen3_vl"])
    check_config_layout(config, Layout(pipeline=2))
    with pytest.raises(ConfigError, match=r"first chunk would hold 1 layers.*first 2 \(deepstack\)"):
        check_config_layout(config, Layout(pipeline=4))
