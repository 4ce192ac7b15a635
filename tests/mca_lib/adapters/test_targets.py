"""Targets are named as PEFT names them, and what is no linear layer of the model is refused by name."""

import pytest

from mca_lib.adapters.targets import find_all_linear_modules, linear_layers, modules, target_names
from mca_lib.errors import ConfigError
from mca_lib.models.registry import config_from_hf
from tests.mca_lib.tiny_models import hf_config

DENSE = ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
LATENT = ["down_proj", "gate_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj", "q_a_proj", "q_b_proj", "up_proj"]


def config(variant: str):
    return config_from_hf({**hf_config(variant).to_dict(), "architectures": None})


@pytest.mark.parametrize(
    ("variant", "leaves"),
    [("llama-mlp-bias", DENSE), ("qwen3", DENSE), ("qwen2-moe", DENSE), ("deepseek-mtp", LATENT),
     ("qwen3.5", sorted([*DENSE, "in_proj_a", "in_proj_b", "in_proj_qkv", "in_proj_z", "out_proj"])),
     ("qwen3-next", sorted([*DENSE, "in_proj_ba", "in_proj_qkvz", "out_proj"])),
     ("phi3-longrope", ["down_proj", "gate_up_proj", "o_proj", "qkv_proj"]),
     ("mixtral", ["k_proj", "o_proj", "q_proj", "v_proj", "w1", "w2", "w3"])],
)  # fmt: skip
def test_all_linear_is_every_linear_layer_but_the_output_layer_and_the_gates(variant, leaves):
    assert find_all_linear_modules(config(variant)) == leaves


def test_all_linear_is_what_peft_takes_it_for():
    from peft import LoraConfig, get_peft_model

    from tests.mca_lib.tiny_models import hf_model

    adapted = get_peft_model(hf_model("llama-bias"), LoraConfig(target_modules="all-linear"))
    theirs = {n.removeprefix("base_model.model.").partition(".lora_A")[0] for n, _ in adapted.named_parameters() if ".lora_A." in n}  # fmt: skip # noqa: E501
    assert target_names(config("llama-bias"), ["all-linear"]) == theirs


def test_a_fused_layer_is_several_modules_and_prediction_layers_are_none():
    mtp = config("deepseek-mtp")
    assert mtp.mtp_num_layers == 2
    names = {name for entry in linear_layers(mtp) for name in modules(entry)}
    assert not [name for name in names if f"layers.{mtp.num_layers}" in name]
    fused = next(entry for entry in linear_layers(config("llama")) if "linear_qkv" in entry.mca)
    assert modules(fused) == tuple(f"model.layers.0.self_attn.{n}_proj" for n in "qkv")


def test_a_target_is_the_end_of_a_name():
    found = target_names(config("deepseek-mtp"), ["shared_experts.up_proj", "layers.2.self_attn.o_proj"])
    assert found == {f"model.layers.{i}.mlp.shared_experts.up_proj" for i in (1, 2, 3)} | {
        "model.layers.2.self_attn.o_proj"
    }
    assert not {n for n in target_names(config("qwen3-moe"), ["q_proj"]) if not n.endswith(".q_proj")}


@pytest.mark.parametrize(
    ("variant", "targets", "named"),
    [
        ("llama", ["q_prj"], r"'q_prj'; did you mean 'q_proj'\?"),
        ("llama", ["oj"], r"'oj'; those of this model are down_proj, "),
        ("llama", ["_proj"], r"'_proj'"),
        ("llama", ["lm_head"], "'lm_head' cannot have an adapter"),
        ("llama", ["q_proj", "embed_tokens"], "'embed_tokens' cannot have an adapter"),
        ("qwen3-moe", ["mlp.gate"], "'mlp.gate' cannot have an adapter"),
        ("qwen2-moe", ["shared_expert_gate"], "'shared_expert_gate' cannot have an adapter"),
        ("llama", ["all-linear", "q_proj"], "all-linear alone"),
        ("llama", [], "name modules"),
        ("qwen3-moe", ["gate_proj"], "adapted together .*up_proj is left out"),
        ("qwen3-moe", ["experts.3.down_proj"], "adapted together .*experts.0.down_proj is left out"),
        ("mixtral", ["w1"], "w3 is left out"),
    ],
)
def test_what_cannot_be_adapted_is_refused_by_name(variant, targets, named):
    with pytest.raises(ConfigError, match=f"^lora.target_modules: .*{named}") as caught:
        target_names(config(variant), targets)
    assert "\n" not in str(caught.value)
