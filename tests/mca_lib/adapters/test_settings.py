"""PEFT's LoraConfig: what works, and what is refused by name."""

import pytest

from mca_lib.adapters.settings import check_lora_config, lora_config, scaling
from mca_lib.errors import ConfigError
from mca_lib.trainers.arguments import FinetuningArguments


def test_arguments_become_pefts_configuration():
    args = FinetuningArguments(
        lora_rank=4, lora_alpha=6, lora_dropout=0.1, use_rslora=True, lora_target="q_proj, o_proj"
    )
    config = lora_config(args)
    assert (config.r, config.lora_alpha, config.lora_dropout, config.use_rslora) == (4, 6, 0.1, True)
    assert sorted(config.target_modules) == ["o_proj", "q_proj"]
    assert lora_config(FinetuningArguments()).target_modules == {"all-linear"}


def test_the_factor_is_pefts():
    from peft import LoraConfig, get_peft_model

    from tests.mca_lib.tiny_models import hf_model

    for rslora in (False, True):
        adapted = get_peft_model(hf_model("llama"), LoraConfig(r=5, lora_alpha=3, use_rslora=rslora, target_modules=["q_proj"]))  # fmt: skip # noqa: E501
        layer = adapted.base_model.model.model.layers[0].self_attn.q_proj
        assert layer.scaling["default"] == scaling(5, 3, rslora)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"r": 0}, "lora.r: 0"),
        ({"r": -3}, "lora.r: -3"),
        ({"lora_alpha": 0}, "lora.alpha: 0"),
        ({"lora_dropout": 1.0}, "lora.dropout: 1.0"),
        ({"use_dora": True}, "use_dora=True"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save="),
        ({"bias": "all"}, "bias='all'"),
        ({"init_lora_weights": "gaussian"}, "init_lora_weights='gaussian'"),
        ({"rank_pattern": {"q_proj": 2}}, "rank_pattern="),
        ({"layers_to_transform": [0]}, "layers_to_transform="),
    ],
)
def test_what_is_not_supported_is_refused_by_name(changes, named):
    from peft import LoraConfig

    with pytest.raises(ConfigError, match=named) as caught:
        check_lora_config(LoraConfig(**{"target_modules": ["q_proj"], **changes}))
    assert "\n" not in str(caught.value)
