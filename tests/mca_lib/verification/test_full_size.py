"""Models of full size, without a weight: the plan is complete against what transformers would save."""

from dataclasses import replace

import pytest

from mca_lib.converter.plan import make_plan
from mca_lib.errors import ConfigError, ModelError
from mca_lib.models import size
from mca_lib.models.layout_rules import check_training_layout
from mca_lib.models.registry import config_from_hf, family_of
from mca_lib.verification.full_size import full_size, main, table_tensors, transformers_tensors
from mca_lib.verification.full_size_configs import CONFIGS, LAYOUTS

# (billions in all, billions per token) of the models' own papers and cards.
PUBLISHED = {
    "Llama-3.1-405B": (405, 405),
    "Qwen2.5-72B": (72.7, 72.7),
    "Mixtral-8x22B": (141, 39),
    "Qwen3-235B-A22B": (235, 22),
    "GLM-4.5": (355, 32 + 1.6),  # the card counts no embedding and output layer
    "Phi-4": (14.7, 14.7),
    "MiniMax-M2": (230, 10 + 1.2),  # likewise
    "DeepSeek-V3": (671, 37),
    "Qwen3-Next-80B-A3B": (80, 3 + 0.87),  # the card counts no embedding and output layer
    "Qwen3.5-27B": (27, 27),
    "Seed-OSS-36B": (36, 36),
    "Qwen2-VL-72B": (73.4, 73.4),
    "Qwen2.5-VL-7B": (8.29, 8.29),
    "Qwen3-VL-4B": (4.44, 4.44),
    "OLMo-2-32B": (32.2, 32.2),
    "Gemma-3-27B": (27.0, 27.0),
    "Qwen3.5-35B-A3B": (35.0, 3.45),  # A3B: rounded down
    "Nemotron-H-8B": (8.1, 8.1),
    "GPT-OSS-120B": (116.8, 5.13 + 0.58),  # the paper counts no embedding among the active ones
}


@pytest.mark.parametrize("name", CONFIGS)
def test_the_plan_is_complete_against_transformers(name: str) -> None:
    row = full_size(name, against_transformers=True)
    assert row.plan.dtype == "bfloat16"
    spelled = row.plan.config(row.config)
    assert {n for e in row.plan.entries for n in e.hf} == set(table_tensors(spelled))


@pytest.mark.parametrize("name", CONFIGS)
def test_a_public_config_is_written_back_as_it_came(name: str) -> None:
    family = family_of(CONFIGS[name]["model_type"])
    written = family.config_to_hf(config_from_hf(CONFIGS[name]))
    assert written == {**CONFIGS[name], "architectures": [family.architecture]}


@pytest.mark.parametrize("name", CONFIGS)
def test_parameters_are_those_that_are_published(name: str) -> None:
    config = config_from_hf(CONFIGS[name])
    total = size.total(config) - size.parts(config)["mtp"]
    assert (total / 1e9, size.active(config) / 1e9) == pytest.approx(PUBLISHED[name], rel=0.02)


@pytest.mark.parametrize("name", CONFIGS)
def test_the_layout_holds_every_layer_once_and_fits_a_device_of_80_gib(name: str) -> None:
    row = full_size(name)
    assert sum(stage.layers for stage in row.stages) == row.config.num_layers
    assert max(stage.total for stage in row.stages) < 80 * 2**30


@pytest.mark.parametrize("name", ["Llama-3.1-405B", "Qwen3-235B-A22B", "DeepSeek-V3"])
def test_layers_that_do_not_divide_need_an_uneven_layout(name: str) -> None:
    _, layout, _ = LAYOUTS[name]
    with pytest.raises(ConfigError, match="does not divide the model's"):
        check_training_layout(
            config_from_hf(CONFIGS[name]), replace(layout, first_stage_layers=None, last_stage_layers=None)
        )


def test_a_tensor_that_transformers_would_not_save_is_refused() -> None:
    """The comparison is no comparison with itself."""
    hf = CONFIGS["Qwen2.5-72B"] | {"num_hidden_layers": 1}
    found = transformers_tensors(hf)
    del found["model.layers.0.self_attn.q_proj.bias"]
    with pytest.raises(ModelError, match=r"missing: model\.layers\.0\.self_attn\.q_proj\.bias"):
        make_plan(config_from_hf(hf), found)


def test_the_command_prints_every_stage(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["Qwen2.5-72B"]) == 0
    shown = capsys.readouterr().out
    assert "72,706,203,648 parameters" in shown
    assert len(shown.splitlines()) == 2 + 4
