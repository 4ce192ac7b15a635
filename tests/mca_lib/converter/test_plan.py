"""The plan names what does not fit before a byte of weights is read."""

import dataclasses
from typing import Any

import pytest

from mca_lib.converter.mappings import Row
from mca_lib.converter.plan import Plan, TensorInfo, entries, make_plan
from mca_lib.errors import ModelError
from mca_lib.models.registry import FAMILIES, config_from_hf
from tests.mca_lib.models.test_registry import BASE

CONFIG = config_from_hf(BASE)
TIED = dataclasses.replace(CONFIG, tie_word_embeddings=True)


def headers(config: Any = CONFIG) -> dict[str, TensorInfo]:
    """What a fitting directory holds."""
    return {
        name: TensorInfo(shape, "bfloat16")
        for entry in entries(config)
        for name, shape in zip(entry.hf, entry.mapping.hf_shapes(config), strict=True)
    }


def test_fitting_tensors_make_a_plan() -> None:
    plan = make_plan(CONFIG, headers())
    assert (plan.dtype, plan.dtype_exceptions, plan.copies) == ("bfloat16", {}, {})
    assert len(plan.entries) == 3 + 6 * CONFIG.num_layers


def test_missing_tensors_are_listed() -> None:
    found = headers()
    del found["model.layers.3.mlp.up_proj.weight"]
    with pytest.raises(ModelError, match=r"missing: model\.layers\.3\.mlp\.up_proj\.weight"):
        make_plan(CONFIG, found)


def test_tensor_that_nothing_uses_is_listed() -> None:
    extra = {"model.layers.0.self_attn.q_proj.bias": TensorInfo((48,), "bfloat16")}
    with pytest.raises(ModelError, match=r"not used by the model: model\.layers\.0\.self_attn\.q_proj\.bias"):
        make_plan(CONFIG, headers() | extra)


def test_layer_beyond_the_config_is_not_dropped() -> None:
    deeper = headers(dataclasses.replace(CONFIG, num_layers=7))
    with pytest.raises(ModelError, match=r"not used by the model: model\.layers\.6"):
        make_plan(CONFIG, deeper)


def test_many_problems_are_counted() -> None:
    found = headers() | {f"model.layers.{i}.input_layernorm.weight": TensorInfo((47,), "bfloat16") for i in range(5)}
    with pytest.raises(ModelError, match="and 2 more") as caught:
        make_plan(CONFIG, found)
    assert str(caught.value).count("expected [48]") == 3


def test_wrong_shape_says_found_and_expected() -> None:
    found = headers() | {"lm_head.weight": TensorInfo((101, 48), "bfloat16")}
    with pytest.raises(ModelError, match=r"lm_head\.weight \[101, 48\], expected \[100, 48\]"):
        make_plan(CONFIG, found)


def test_integer_weights_are_refused() -> None:
    found = headers() | {"model.norm.weight": TensorInfo((48,), "I8")}
    with pytest.raises(ModelError, match=r"unsupported dtype: model\.norm\.weight \(I8\)"):
        make_plan(CONFIG, found)


def test_dtypes_that_differ_within_a_fused_tensor_are_refused() -> None:
    found = headers() | {"model.layers.0.self_attn.k_proj.weight": TensorInfo((16, 48), "float32")}
    with pytest.raises(ModelError, match="mixed dtypes"):
        make_plan(CONFIG, found)


def test_dtype_of_a_whole_row_of_the_table_may_differ() -> None:
    norms = {n: TensorInfo(i.shape, "float32") for n, i in headers().items() if n.endswith("norm.weight")}
    plan = make_plan(CONFIG, headers() | norms)
    assert plan.config(CONFIG).source_dtype == "bfloat16"
    assert set(plan.config(CONFIG).source_dtype_exceptions) == set(norms)


def test_many_problems_are_counted_not_dumped() -> None:
    with pytest.raises(ModelError, match=r"missing: .* and \d+ more") as error:
        make_plan(CONFIG, {})
    assert len(str(error.value)) < 600


def test_tensor_used_twice_by_a_table_is_refused() -> None:
    family = FAMILIES["llama"]
    twice = Row("decoder.layers.{layer}.mlp.extra", "model.layers.{layer}.mlp.down_proj.weight", ("hidden_size",) * 2)
    with pytest.raises(ModelError, match="used twice"):
        make_plan(CONFIG, headers(), dataclasses.replace(family, weights=(*family.weights, twice)))


def test_target_filled_twice_by_a_table_is_refused() -> None:
    family = FAMILIES["llama"]
    again = dataclasses.replace(family, weights=(*family.weights, family.weights[0]))
    with pytest.raises(ModelError, match="filled twice"):
        make_plan(CONFIG, headers(), again)


def test_rotary_frequencies_of_old_checkpoints_are_ignored() -> None:
    old = {"model.layers.0.self_attn.rotary_emb.inv_freq": TensorInfo((4,), "float32")}
    assert isinstance(make_plan(CONFIG, headers() | old), Plan)


def test_untied_model_without_output_layer_is_refused() -> None:
    with pytest.raises(ModelError, match=r"missing: lm_head\.weight"):
        make_plan(CONFIG, headers(TIED))


def test_stored_output_layer_of_a_tied_model_is_kept_in_mind() -> None:
    assert make_plan(TIED, headers(CONFIG)).copies == {"lm_head.weight": "model.embed_tokens.weight"}
