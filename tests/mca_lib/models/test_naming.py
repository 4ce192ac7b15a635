"""Names of a layer's parameters become the checkpoint's, whichever implementation made the layer."""

from types import SimpleNamespace
from typing import Any

import pytest

from mca_lib.models.config import McaModelConfig
from mca_lib.models.naming import checkpoint_parameters, stored_key, written_out
from mca_lib.models.registry import config_from_hf
from tests.mca_lib.models.test_expert_families import MTP
from tests.mca_lib.models.test_registry import BASES

MIXED = config_from_hf({**BASES["qwen3_moe"], "decoder_sparse_step": 2})
LATENT = config_from_hf(MTP)


def named(config: McaModelConfig, names: list[str], first_layer: int = 2, experts: range = range(2, 4)) -> list[str]:
    """Checkpoint names for a chunk that begins at `first_layer` and whose layers hold `experts`."""

    def layer(number: int) -> Any:
        return SimpleNamespace(layer_number=number + 1, mlp=SimpleNamespace(local_expert_indices=list(experts)))

    buffers = [(n, None) for n in names if n.endswith(("expert_bias", "tokens_per_expert"))]
    model = SimpleNamespace(
        mca_config=config,
        named_parameters=lambda: [(n, None) for n in names if (n, None) not in buffers],
        named_buffers=lambda: buffers,
        decoder=SimpleNamespace(layers=[layer(first_layer + i) for i in range(2)]),
        mtp=SimpleNamespace(layers=[SimpleNamespace(mtp_model_layer=layer(0))]),
    )
    return [name for name, _ in checkpoint_parameters(model)]


@pytest.mark.parametrize(
    ("config", "local", "engine", "stored"),
    [
        # The norm before an MLP is a part of its first linear layer, that before experts stands alone.
        (
            MIXED,
            "0.pre_mlp_layernorm.weight",
            "0.mlp.linear_fc1.layer_norm_weight",
            "2.mlp.linear_fc1.layer_norm_weight",
        ),
        (MIXED, "1.pre_mlp_layernorm.weight", "1.pre_mlp_layernorm.weight", "3.pre_mlp_layernorm.weight"),
        (
            MIXED,
            "1.input_layernorm.weight",
            "1.self_attention.linear_qkv.layer_norm_weight",
            "3.self_attention.linear_qkv.layer_norm_weight",
        ),
        # Experts are numbered over all ranks; Transformer Engine's grouped layer numbers its weights.
        (
            MIXED,
            "1.mlp.experts.local_experts.1.linear_fc1.weight",
            "1.mlp.experts.linear_fc1.weight1",
            "3.mlp.experts.experts.3.linear_fc1.weight",
        ),
        (MIXED, "1.mlp.router.weight", "1.mlp.router.weight", "3.mlp.router.weight"),
        # Latent attention has a norm of its own, and those of the latents are fused.
        (LATENT, "1.input_layernorm.weight", "1.input_layernorm.weight", "3.input_layernorm.weight"),
        (
            LATENT,
            "1.self_attention.q_layernorm.weight",
            "1.self_attention.linear_q_up_proj.layer_norm_weight",
            "3.self_attention.linear_q_up_proj.layer_norm_weight",
        ),
        (
            LATENT,
            "1.self_attention.kv_layernorm.weight",
            "1.self_attention.linear_kv_up_proj.layer_norm_weight",
            "3.self_attention.linear_kv_up_proj.layer_norm_weight",
        ),
    ],
)
def test_both_implementations_have_one_checkpoint(config: McaModelConfig, local: str, engine: str, stored: str) -> None:
    for own in (local, engine):
        assert named(config, [f"decoder.layers.{own}"]) == [f"decoder.layers.{stored}"]


def test_prediction_layers_keep_megatrons_name() -> None:
    own = ["eh_proj.weight", "mtp_model_layer.mlp.experts.local_experts.0.linear_fc2.weight"]
    assert named(LATENT, [f"mtp.layers.0.{n}" for n in own]) == [
        "mtp.layers.0.eh_proj.weight",
        "mtp.layers.0.transformer_layer.mlp.experts.experts.2.linear_fc2.weight",
    ]


def test_expert_bias_is_a_weight_and_other_buffers_are_not() -> None:
    own = ["decoder.layers.1.mlp.router.expert_bias", "decoder.layers.1.mlp.router.local_tokens_per_expert"]
    assert named(LATENT, own) == ["decoder.layers.3.mlp.router.expert_bias"]


@pytest.mark.parametrize(
    ("name", "stacked", "key", "index"),
    [
        ("decoder.layers.3.mlp.router.weight", True, "decoder.layers.mlp.router.weight", (3,)),
        ("decoder.layers.3.mlp.router.weight", False, "decoder.layers.3.mlp.router.weight", ()),
        (
            "decoder.layers.3.mlp.experts.experts.1.linear_fc1.weight",
            True,
            "decoder.layers.mlp.experts.experts.linear_fc1.weight",
            (3, 1),
        ),
        (
            "mtp.layers.0.transformer_layer.mlp.experts.experts.1.linear_fc1.weight",
            True,
            "mtp.layers.0.transformer_layer.mlp.experts.experts.linear_fc1.weight",
            (1,),
        ),
    ],
)
def test_stored_key_and_back(name: str, stacked: bool, key: str, index: tuple[int, ...]) -> None:
    assert stored_key(name, stacked) == (key, index)
    assert (name, index, (7, 5)) in list(written_out(key, (*(i + 1 for i in index), 7, 5)))
