"""Configs and plans of the families with experts: read as transformers reads them, or refused by name."""

from dataclasses import replace
from typing import Any

import pytest

from mca_lib.converter.plan import TensorInfo, entries, make_plan
from mca_lib.errors import ConfigError, ModelError
from mca_lib.models.config import McaModelConfig
from mca_lib.models.layout import Layout
from mca_lib.models.layout_rules import check_config_layout
from mca_lib.models.registry import FAMILIES, config_from_hf
from mca_lib.models.size import active, parts, total
from tests.mca_lib.models.test_registry import BASES

DEEPSEEK = {**BASES["deepseek_v3"], "kv_lora_rank": 8, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 7}
MTP = {**DEEPSEEK, "num_nextn_predict_layers": 2}

PUBLISHED = {
    "Mixtral-8x7B": (
        46_702_792_704,
        12_879_925_248,
        {
            "model_type": "mixtral",
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_attention_heads": 32,
            "num_hidden_layers": 32,
            "num_key_value_heads": 8,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "vocab_size": 32000,
        },
    ),
    "Qwen1.5-MoE-A2.7B": (
        14_315_784_192,
        2_689_173_504,
        {
            "model_type": "qwen2_moe",
            "hidden_size": 2048,
            "intermediate_size": 5632,
            "moe_intermediate_size": 1408,
            "shared_expert_intermediate_size": 5632,
            "num_attention_heads": 16,
            "num_hidden_layers": 24,
            "num_key_value_heads": 16,
            "num_experts": 60,
            "num_experts_per_tok": 4,
            "vocab_size": 151936,
        },
    ),
    "Qwen3-30B-A3B": (
        30_532_122_624,
        3_353_032_704,
        {
            "model_type": "qwen3_moe",
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "moe_intermediate_size": 768,
            "num_attention_heads": 32,
            "num_hidden_layers": 48,
            "num_key_value_heads": 4,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "vocab_size": 151936,
            "head_dim": 128,
        },
    ),
    "DeepSeek-V3": (
        671_026_419_200,
        37_552_297_472,
        {
            "model_type": "deepseek_v3",
            "hidden_size": 7168,
            "intermediate_size": 18432,
            "moe_intermediate_size": 2048,
            "num_attention_heads": 128,
            "num_hidden_layers": 61,
            "num_key_value_heads": 128,
            "n_routed_experts": 256,
            "n_shared_experts": 1,
            "num_experts_per_tok": 8,
            "vocab_size": 129280,
            "q_lora_rank": 1536,
        },
    ),
}
"""Parameters in all and per token, without multi-token prediction, of models whose totals are public."""


@pytest.mark.parametrize("model", PUBLISHED)
def test_parameters_of_published_models(model: str) -> None:
    all_of_them, per_token, hf = PUBLISHED[model]
    config = config_from_hf(hf)
    assert total(config) - parts(config)["mtp"] == all_of_them
    assert active(config) == per_token


@pytest.mark.parametrize(
    ("changes", "layers"),
    [
        ({}, (0, 1, 2, 3, 4, 5)),
        ({"decoder_sparse_step": 2}, (1, 3, 5)),
        ({"mlp_only_layers": [0, 3]}, (1, 2, 4, 5)),
        ({"decoder_sparse_step": 2, "mlp_only_layers": [3]}, (1, 5)),
    ],
)
@pytest.mark.parametrize("model_type", ["qwen2_moe", "qwen3_moe"])
def test_layers_with_experts(model_type: str, changes: dict[str, Any], layers: tuple[int, ...]) -> None:
    config = config_from_hf({**BASES[model_type], **changes})
    assert config.moe_layers == layers
    assert config.stacked_layers == (len(layers) == 6)


def test_first_layers_of_deepseek_are_dense() -> None:
    assert config_from_hf(DEEPSEEK).dense_layers == (0, 1, 2)
    assert config_from_hf({**DEEPSEEK, "first_k_dense_replace": 1}).dense_layers == (0,)


@pytest.mark.parametrize(
    ("model_type", "own", "other"),
    [
        ("qwen3_moe", "num_experts", "num_local_experts"),  # transformers 5 writes the second
        ("mixtral", "num_local_experts", "num_experts"),
        ("deepseek_v3", "n_routed_experts", "num_local_experts"),
    ],
)
def test_every_spelling_is_read_and_written_back(model_type: str, own: str, other: str) -> None:
    hf = dict(BASES[model_type])
    hf[other] = hf.pop(own)
    config = config_from_hf(hf)
    assert config.moe.num_experts == hf[other]
    assert FAMILIES[model_type].config_to_hf(config) == hf
    with pytest.raises(ModelError, match=f"{own}=2 and {other}={hf[other]} differ"):
        config_from_hf({**hf, own: 2})


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}

REFUSED = [
    ("mixtral", {"num_experts_per_tok": 5}, "5 experts per token of 4 experts"),
    ("mixtral", {"num_experts_per_tok": 1}, "normalized weight is always 1"),
    ("qwen3_moe", {"mlp_only_layers": [0, 1, 2, 3, 4, 5]}, "no layer has experts"),
    ("qwen3_moe", {"num_experts": 0}, "num_experts must be a positive integer"),
    ("qwen3_moe", {"decoder_sparse_step": 0}, r"config\.json: decoder_sparse_step=0"),
    ("qwen3_moe", {"mlp_only_layers": ["1"]}, r"config\.json: mlp_only_layers="),
    ("deepseek_v3", {"v_head_dim": 256}, "v_head_dim=256 is larger"),
    ("deepseek_v3", {"first_k_dense_replace": 6}, "no layer has experts"),
    ("deepseek_v3", {"first_k_dense_replace": "3"}, r"config\.json: first_k_dense_replace='3'"),
    ("deepseek_v3", {"n_routed_experts": None}, "n_routed_experts is missing"),
    ("deepseek_v3", {"num_key_value_heads": 2}, r"num_query_groups=2 \(num_key_value_heads\) must be"),
    ("deepseek_v3", {"n_group": 3, "topk_group": 1}, "16 experts do not divide into num_groups=3"),
    ("deepseek_v3", {"n_group": 16, "topk_group": 1}, "16 experts do not divide into num_groups=16 .* of 2 or more"),
    ("deepseek_v3", {"topk_group": 9}, r"from group_topk=9 \(topk_group\) of 8 groups of 2"),
    ("deepseek_v3", {"num_experts_per_tok": 3}, r"3 experts per token from group_topk=1 \(topk_group\) of 8 groups"),
    ("deepseek_v3", {"n_group": 4, "topk_group": 2}, "would rate a group by its 1 best"),
    ("deepseek_v3", {"qk_rope_head_dim": 63}, "qk_rope_head_dim=63 is odd"),
    ("deepseek_v3", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "LinearRope is not supported"),
    ("deepseek_v3", {"rope_scaling": {**YARN, "truncate": False}}, "truncate=False is not supported"),
    ("deepseek_v3", {"rope_scaling": {**YARN, "factor": 1.0, "attention_factor": 1.3}}, "attention_factor=1.3 with"),
    ("llama", {"head_dim": 9}, r"kv_channels=9 \(head_dim\) is odd"),
    ("mistral", {"hidden_size": 44, "num_attention_heads": 6}, r"kv_channels=7 \(head_dim\) is odd"),
    ("llama", {"hidden_size": 50}, "hidden_size=50 does not divide by num_attention_heads=6"),
]


@pytest.mark.parametrize(("model_type", "changes", "message"), REFUSED)
def test_what_cannot_be_is_one_line(model_type: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message) as error:
        config_from_hf({**BASES[model_type], **changes})
    assert "\n" not in str(error.value)


def test_default_groups_are_checked_as_given_ones_are() -> None:
    plain = {name: value for name, value in DEEPSEEK.items() if name not in ("n_group", "topk_group")}
    config = config_from_hf({**plain, "num_experts_per_tok": 8})
    assert (config.moe.num_groups, config.moe.group_topk) == (8, 4)
    with pytest.raises(ModelError, match="group_topk=4"):
        config_from_hf(plain)


def test_publishers_code_is_no_obstacle_where_transformers_has_the_model() -> None:
    names = {"AutoConfig": "configuration_deepseek.DeepseekV3Config", "AutoModel": "modeling_deepseek.DeepseekV3Model"}
    config_from_hf({**DEEPSEEK, "auto_map": names})


def test_queries_without_a_latent() -> None:
    assert config_from_hf({**DEEPSEEK, "q_lora_rank": None}).latent_attention.direct_q
    assert config_from_hf(DEEPSEEK).latent_attention.q_lora_rank == 1536


def test_windows_of_qwen2_moe_alternate() -> None:
    """As transformers says where a config has no `layer_types`: the even layers below `max_window_layers`."""
    from transformers import Qwen2MoeConfig

    fields = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 3, "num_hidden_layers": 6}
    config = config_from_hf({**BASES["qwen2_moe"], **fields})
    types = Qwen2MoeConfig(**fields).layer_types
    assert config.full_attention_layers == tuple(i for i, kind in enumerate(types) if kind == "full_attention")
    assert config.sliding_window == 8


def headers(config: McaModelConfig, copies: bool = False) -> dict[str, TensorInfo]:
    """What a fitting directory holds."""
    found = {
        name: TensorInfo(shape, "bfloat16")
        for entry in entries(config)
        for name, shape in zip(entry.hf, entry.mapping.hf_shapes(config), strict=True)
    }
    if copies:
        found |= {name: found[of] for name, of in FAMILIES[config.model_type].copies_of(config).items()}
    return found


def test_copies_in_the_source_are_remembered() -> None:
    config = config_from_hf(MTP)
    plan = make_plan(config, headers(config, copies=True))
    assert plan.copies == {
        f"model.layers.{i}.{name}": of
        for i in (6, 7)
        for name, of in (
            ("embed_tokens.weight", "model.embed_tokens.weight"),
            ("shared_head.head.weight", "lm_head.weight"),
        )
    }
    assert set(plan.config(config).source_copies) == set(plan.copies)
    assert plan.config(config).mtp_num_layers == 2


def test_copies_of_a_tied_model_are_all_the_embedding() -> None:
    config = config_from_hf({**MTP, "tie_word_embeddings": True})
    assert set(FAMILIES["deepseek_v3"].copies_of(config).values()) == {"model.embed_tokens.weight"}


def test_tied_model_with_prediction_layers_is_not_split_into_stages() -> None:
    config = config_from_hf({**MTP, "tie_word_embeddings": True})
    check_config_layout(config, Layout(tensor=2))
    with pytest.raises(ConfigError, match=r"parallel\.pipeline=2: a model with tied embeddings"):
        check_config_layout(config, Layout(pipeline=2))


@pytest.mark.parametrize(("field", "message"), [("q_lora_rank", "query latent"), ("kv_lora_rank", "key/value latent")])
def test_latents_divide_by_the_tensor_parallel_ranks(field: str, message: str) -> None:
    config = config_from_hf({**DEEPSEEK, "q_lora_rank": 12, field: 9})
    with pytest.raises(ConfigError, match=rf"parallel\.tensor=2 does not divide the model's {message} size"):
        check_config_layout(config, Layout(tensor=2))


def test_copy_of_another_shape_is_named() -> None:
    config = config_from_hf(MTP)
    found = headers(config) | {"model.layers.6.embed_tokens.weight": TensorInfo((99, 48), "bfloat16")}
    with pytest.raises(ModelError, match=r"of the wrong shape: model\.layers\.6\.embed_tokens\.weight \[99, 48\]"):
        make_plan(config, found)


def test_model_saved_by_transformers_has_no_prediction_layers() -> None:
    """transformers 5.24 drops them on load and writes their number on save."""
    config = config_from_hf(MTP)
    plan = make_plan(config, headers(replace(config, mtp_num_layers=0)))
    stored = plan.config(config)
    assert stored.mtp_num_layers == 0
    assert FAMILIES["deepseek_v3"].config_to_hf(stored)["num_nextn_predict_layers"] == 0


@pytest.mark.parametrize(("said", "held"), [(2, 1), (0, 1), (1, 2)])
def test_other_number_of_prediction_layers_says_what_to_set(said: int, held: int) -> None:
    config = config_from_hf({**MTP, "num_nextn_predict_layers": said})
    with pytest.raises(ModelError) as error:
        make_plan(config, headers(replace(config, mtp_num_layers=held)))
    message = f"num_nextn_predict_layers of config.json: {said}, and the files have {held}: set it to {held}"
    assert message in str(error.value)
