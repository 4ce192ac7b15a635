"""Ropes of a config.json: every spelling is read as transformers reads it, and every field written back."""

from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest

from mca_lib.errors import ModelError
from mca_lib.models.config import LinearRope, Llama3Rope, McaModelConfig, YarnRope
from mca_lib.models.registry import FAMILIES, check_hf_config, config_from_hf
from tests.mca_lib.models.test_registry import BASE, BASES

LLAMA3 = {"factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
YARN = {
    "factor": 4.0,
    "original_max_position_embeddings": 1024,
    "beta_fast": 16.0,
    "beta_slow": 2.0,
    "attention_factor": 1.3,
    "mscale": 0.8,
    "mscale_all_dim": 0.7,
    "truncate": False,
}
KINDS = {
    "linear": ({"factor": 2.0}, LinearRope(2.0)),
    "llama3": (LLAMA3, Llama3Rope(32.0, 1.0, 4.0, 8192)),
    "yarn": (YARN, YarnRope(4.0, 1024, 16.0, 2.0, 1.3, 0.8, 0.7, False)),
}
SPELLINGS = {
    "transformers 4": lambda kind, fields: {"rope_theta": 5e5, "rope_scaling": {"rope_type": kind, **fields}},
    "older still": lambda kind, fields: {"rope_theta": 5e5, "rope_scaling": {"type": kind, **fields}},
    "transformers 5": lambda kind, fields: {"rope_parameters": {"rope_type": kind, "rope_theta": 5e5, **fields}},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_rope_is_read_from_every_spelling(spelling: str, kind: str) -> None:
    fields, expected = KINDS[kind]
    config = config_from_hf({**BASE, **SPELLINGS[spelling](kind, fields)})
    assert (config.rotary_base, config.rope_scaling) == (5e5, expected)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("major", [4, 5])
def test_every_field_is_written_as_the_release_reads_it(spelling: str, kind: str, major: int) -> None:
    fields, _ = KINDS[kind]
    hf = {**BASE, **SPELLINGS[spelling](kind, fields), "my_own_key": 1}
    written = FAMILIES["llama"].config_to_hf(config_from_hf(hf), major)
    if major == 4:
        assert written["rope_theta"] == 5e5
        kinds = {k: v for k, v in written["rope_scaling"].items() if k not in fields}
        assert kinds in ({"rope_type": kind}, {"type": kind})
        assert "rope_parameters" not in written
    else:
        assert written["rope_parameters"] == {"rope_type": kind, "rope_theta": 5e5, **fields}
        assert not {"rope_theta", "rope_scaling"} & set(written)
    assert config_from_hf(written).rope_scaling == config_from_hf(hf).rope_scaling
    assert written["my_own_key"] == 1


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_rope_stays_as_the_source_spelled_it_unless_asked(spelling: str) -> None:
    hf = {**BASE, **SPELLINGS[spelling]("llama3", LLAMA3)}
    assert FAMILIES["llama"].config_to_hf(config_from_hf(hf)) == hf


@pytest.mark.parametrize("major", [4, 5])
@pytest.mark.parametrize("new", [None, LinearRope(3.0), YarnRope(8.0, 512, beta_slow=2.0)])
def test_changed_rope_reaches_the_hf_config(new: Any, major: int) -> None:
    hf = {**BASE, **SPELLINGS["transformers 4"]("llama3", LLAMA3)}
    config = replace(config_from_hf(hf), rope_scaling=new, rotary_base=7e4)
    again = config_from_hf(FAMILIES["llama"].config_to_hf(config, major))
    assert (again.rotary_base, again.rope_scaling) == (7e4, new)


def test_rope_survives_mca_config() -> None:
    for fields, expected in KINDS.values():
        kind = next(k for k, v in KINDS.items() if v[1] is expected)
        config = config_from_hf({**BASE, **SPELLINGS["transformers 5"](kind, fields)})
        assert McaModelConfig.from_dict(config.to_dict()) == config


ONE_ROPE = [
    name for name, hf in BASES.items() if config_from_hf(hf).rotary and FAMILIES[name].sliding_rope_base is None
]
"""The others are in `test_two_ropes`."""


@pytest.mark.parametrize("model_type", ONE_ROPE)
@pytest.mark.parametrize("spelling", [{}, {"rope_scaling": None}, {"rope_parameters": {"rope_type": "default"}}])
def test_absent_base_is_transformers_default(model_type: str, spelling: dict[str, Any]) -> None:
    from transformers import AutoConfig

    hf = {**BASES[model_type], **deepcopy(spelling)}  # transformers writes into it
    expected = AutoConfig.for_model(**hf).rope_parameters["rope_theta"]
    assert config_from_hf(hf).rotary_base == expected


def test_plain_rope_of_transformers_5_is_not_taken_for_a_scaled_one() -> None:
    config = config_from_hf({**BASE, "rope_parameters": {"rope_type": "default", "rope_theta": 1e5}})
    assert (config.rotary_base, config.rope_scaling) == (1e5, None)


def test_yarn_is_scaled_from_the_length_before_and_not_from_the_positions() -> None:
    hf = {**BASE, "max_position_embeddings": 4096}
    rope = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}
    given = config_from_hf({**hf, "rope_parameters": {**rope, "original_max_position_embeddings": 1024}})
    assert given.rope_scaling.original_max_position_embeddings == 1024
    # Without one, transformers takes the number of positions.
    assert config_from_hf({**hf, "rope_parameters": rope}).rope_scaling.original_max_position_embeddings == 4096
    outer = {**hf, "original_max_position_embeddings": 2048, "rope_parameters": rope}
    assert config_from_hf(outer).rope_scaling.original_max_position_embeddings == 2048


LLAMA3_ROPE = {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "dynamic": ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type='dynamic'"),
    "longrope": ({"rope_parameters": {"rope_type": "longrope", "long_factor": [1.0]}}, "rope_type='longrope'"),
    "a part of the channels": (
        {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
        "partial_rotary_factor=0.5",
    ),
    "ropes by layer": (
        {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
        "rope_parameters.full_attention",
    ),
    "a factor without a kind": ({"rope_parameters": {"factor": 8.0}}, "rope_parameters.factor without"),
    "a field of another kind": (
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "beta_fast": 3.0}},
        "rope_parameters.beta_fast is not a field of rope_type 'linear'",
    ),
    "two ropes that differ": (
        {"rope_parameters": {"rope_theta": 1e5}, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
        "both given and differ",
    ),
    "two bases that differ": (
        {"rope_theta": 1e4, "rope_parameters": {"rope_theta": 1e5, "rope_type": "default"}},
        "rope_parameters.rope_theta and rope_theta are both given and differ",
    ),
    "two kinds that differ": (
        {"rope_scaling": {"type": "linear", "rope_type": "yarn", "factor": 2.0}},
        "rope_scaling.rope_type='yarn' and rope_scaling.type='linear' differ",
    ),
    "two lengths that differ": (
        {"original_max_position_embeddings": 99, "rope_parameters": LLAMA3_ROPE},
        "original_max_position_embeddings are both given and differ",
    ),
    "llama 3 factors in reverse": (
        {"rope_parameters": {**LLAMA3_ROPE, "high_freq_factor": 1.0}},
        "high_freq_factor must be greater",
    ),
    "a truncation that is null": (
        {"rope_parameters": {"rope_type": "yarn", **YARN, "truncate": None}},
        "rope_parameters.truncate=null",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_rope_that_is_not_carried_over_is_refused_by_name(case: str) -> None:
    fields, message = REFUSED[case]
    with pytest.raises(ModelError, match=message) as error:
        check_hf_config({**BASE, **fields})
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("kind", "field"), [(k, f) for k in ("linear", "llama3") for f in KINDS[k][0]])
def test_factors_have_no_defaults(kind: str, field: str) -> None:
    rope = {"rope_type": kind, "rope_theta": 5e5, **KINDS[kind][0]}
    del rope[field]
    with pytest.raises(ModelError, match=rf"rope_parameters\.{field} is missing"):
        check_hf_config({**BASE, "rope_parameters": rope})


@pytest.mark.parametrize("field", ["rope_theta", "factor", "original_max_position_embeddings", "beta_fast", "mscale"])
@pytest.mark.parametrize("value", ["8", float("nan"), -1.0])
def test_rope_number_of_another_kind_is_named(field: str, value: object) -> None:
    rope = {"rope_type": "yarn", "rope_theta": 5e5, **YARN, field: value}
    with pytest.raises(ModelError, match=rf"rope_parameters\.{field}="):
        check_hf_config({**BASE, "rope_parameters": rope})
