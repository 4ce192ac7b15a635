"""What is put in place of Megatron's, and whether it is still needed. Parity is that of `test_parity`."""

from pathlib import Path
from typing import Any

import pytest
import torch

from mca_lib.errors import ConfigError, ModelError
from mca_lib.models.layout import Layout
from mca_lib.models.layout_rules import check_config_layout
from mca_lib.models.registry import check_hf_config, config_from_hf
from mca_lib.verification.full_size_configs import CONFIGS
from tests.mca_lib.models import parity_ranks
from tests.mca_lib.models.linear_attention import delta_net_ranks
from tests.mca_lib.models.test_parity import LOGITS
from tests.mca_lib.tiny_models import hf_config


def test_megatron_still_needs_what_is_replaced(ranks: Any) -> None:
    for what, works in ranks(1, delta_net_ranks.works_by_itself)[0].items():
        assert not works, f"Megatron can {what} without our answer now: remove it"


def test_megatron_calls_our_kernels(ranks: Any) -> None:
    found = ranks(1, delta_net_ranks.kernels_after_installation)[0]
    assert all(found.values()), found


def test_megatron_still_loses_gradients_of_the_output_norm(ranks: Any, tmp_path: Path) -> None:
    """The reason of `HeadNorm`; when this fails, try without."""
    ranks(1, parity_ranks.prepare, tmp_path, ["qwen3.5"])
    with_megatrons = delta_net_ranks.compare_with_megatrons_output_norm
    for errors in ranks(2, with_megatrons, tmp_path, "qwen3.5", {"tensor": 2}):
        assert errors.logits <= LOGITS
        assert errors.gradient > 0.1
        assert errors.gradient_of.endswith("out_norm.weight")


def test_l2norm_is_that_of_transformers() -> None:
    from transformers.models.qwen3_next.modeling_qwen3_next import l2norm

    from mca_lib.models.linear_attention.reference_kernels import l2norm as ours

    x = torch.randn(5, 3, 8, dtype=torch.float64) * 1e-3  # the epsilon counts
    torch.testing.assert_close(ours(x), l2norm(x), rtol=1e-14, atol=0)
    assert ours(x.bfloat16()).dtype == torch.bfloat16


def test_documents_are_numbered_by_their_bounds() -> None:
    from mca_lib.models.linear_attention.reference_kernels import document_numbers

    bounds = torch.tensor([0, 2, 2, 5], dtype=torch.int32)  # the second has no token
    assert document_numbers(bounds, 5).tolist() == [[0, 0, 2, 2, 2]]
    assert document_numbers(None, 5) is None


@pytest.mark.parametrize("sizes", [{"tensor": 8}, {"tensor": 4, "context": 2}, {"context": 8}])
def test_ranks_that_do_not_share_the_key_heads_are_refused(sizes: dict[str, int]) -> None:
    config = config_from_hf(hf_config("qwen3.5", num_attention_heads=8, num_key_value_heads=8).to_dict())
    with pytest.raises(ConfigError, match=r"does not divide the 4 key heads .* whose product is one of \[1, 2, 4\]"):
        check_config_layout(config, Layout(**sizes))
    check_config_layout(config, Layout(tensor=2, context=2))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layer_types": ["linear_attention"]}, "layer_types names 1 layers, num_hidden_layers=64"),
        ({"layer_types": ["mamba"] * 64}, "layer_types: 'mamba' is none of linear_attention, full_attention"),
        ({"full_attention_interval": 0}, "full_attention_interval=0 cannot be used"),
        ({"linear_num_value_heads": 24}, "24 value heads .* do not divide among 16 key heads"),
        ({"attn_output_gate": False}, "attn_output_gate=False is not supported"),
        ({"use_sliding_window": True}, "use_sliding_window=True is not supported"),
        ({"linear_conv_kernel_dim": "4"}, "linear_conv_kernel_dim='4' cannot be used"),
    ],
)
def test_what_cannot_be_carried_over_is_refused_by_name(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message) as error:
        check_hf_config({**CONFIGS["Qwen3.5-27B"], **change})
    assert "\n" not in str(error.value)


PUBLISHED = {
    "Qwen3-Next-80B-A3B": {
        "architectures": ["Qwen3NextForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 151643,
        "eos_token_id": 151645,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "output_router_logits": False,
        "router_aux_loss_coef": 0.001,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "use_sliding_window": False,
    },
    "Qwen3.5-27B": {
        "architectures": ["Qwen3_5ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "dtype": "bfloat16",
        "eos_token_id": 248044,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "mamba_ssm_dtype": "float32",
        "mlp_only_layers": [],
        "output_gate_type": "swish",
        "tie_word_embeddings": False,
        "use_cache": True,
    },
}
"""Fields of published config.json that say nothing new."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs_are_read(name: str) -> None:
    config = config_from_hf({**CONFIGS[name], **PUBLISHED[name]})
    assert config.rotary_channels == 64
    assert (config.rotary_base, config.rope_scaling) == (1e7, None)
    assert config.mtp_num_layers == 1
    assert config.attention_output_gate
    assert config.zero_centered_norms


def test_layers_take_turns_as_either_spelling_says() -> None:
    config = config_from_hf(CONFIGS["Qwen3.5-27B"])
    assert config.attention_layers == tuple(range(3, 64, 4))
    types = ["full_attention" if i in config.attention_layers else "linear_attention" for i in range(64)]
    spelled = config_from_hf({**CONFIGS["Qwen3.5-27B"], "layer_types": types, "full_attention_interval": 2})
    assert spelled.linear_attention_layers == config.linear_attention_layers
    assert not config.stacked_layers


def test_such_a_transformer_cannot_become_a_hybrid() -> None:
    from mca_lib.models.config import HybridLayers

    with pytest.raises(ConfigError, match="cannot become a hybrid: it has zero-centred norms"):
        config_from_hf({**CONFIGS["Qwen3.5-27B"], "mtp_num_hidden_layers": 0}).with_hybrid(HybridLayers("*-" * 64))
