"""Options of a training that a model cannot have are named by the recipe's field."""

from types import SimpleNamespace

import pytest

from mca_lib.errors import ConfigError
from mca_lib.models.registry import config_from_hf
from mca_lib.models.training_rules import check_training_options
from tests.mca_lib.tiny_models import hf_config

NONE = {
    "moe_aux_loss_coeff": 0.0,
    "moe_z_loss_coeff": 0.0,
    "moe_router_bias_update_rate": 0.0,
    "fp8": None,
    "freeze": [],
}


def check(variant: str, **options: object) -> None:
    changes = {"linear_num_key_heads": 3, "linear_num_value_heads": 9} if variant == "qwen3.5" else {}
    check_training_options(config_from_hf(hf_config(variant, **changes).to_dict()), SimpleNamespace(**NONE | options))


@pytest.mark.parametrize(
    ("variant", "options", "said"),
    [
        ("llama", {"moe_aux_loss_coeff": 0.1}, r"moe_aux_loss_coeff=0\.1: a llama model has no experts"),
        ("llama", {"moe_z_loss_coeff": 0.1}, r"moe_z_loss_coeff=0\.1: a llama model has no experts"),
        ("qwen2-moe", {"moe_router_bias_update_rate": 0.1}, r"moe_router_bias_update_rate=0\.1: .* have no biases"),
        ("qwen3.5", {"fp8": "hybrid"}, r"fp8=hybrid: .* gated delta nets have 234 rows, no multiple of 16"),
        ("qwen2-moe", {"fp8": "hybrid"}, r"fp8=hybrid: not for a model with experts"),
    ],
)
def test_an_option_that_is_not_for_the_model_is_named(variant: str, options: dict, said: str):
    with pytest.raises(ConfigError, match=rf"training\.{said}"):
        check(variant, **options)


def test_options_that_fit():
    check("llama", fp8="e4m3", freeze=["embed_tokens"])
    check("qwen2-moe", moe_aux_loss_coeff=0.1, moe_z_loss_coeff=0.1)
    check("deepseek-mtp", moe_router_bias_update_rate=0.1)
