"""Ropes that differ between layers with a window and those without: read and written as transformers spells them."""

from dataclasses import replace
from typing import Any

import pytest

from mca_lib.errors import ModelError
from mca_lib.models.config import LinearRope, McaModelConfig, YarnRope
from mca_lib.models.registry import FAMILIES, check_config, config_from_hf
from tests.mca_lib.models.test_registry import BASES

BASE = BASES["gemma3_text"]
# The config.json of google/gemma-3-4b-it's language model, as transformers 4 wrote it.
PUBLIC = {"rope_theta": 1000000.0, "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "rope_local_base_freq": 1e4}
FULL, SLIDING = {"rope_type": "linear", "rope_theta": 5e5, "factor": 2.0}, {"rope_type": "default", "rope_theta": 3e4}

SPELLINGS: dict[str, tuple[dict[str, Any], tuple[float, Any, float]]] = {
    "absent": ({}, (1e6, None, 1e4)),
    "transformers 4": (PUBLIC, (1e6, LinearRope(8.0), 1e4)),
    "transformers 4, no scaling": ({"rope_theta": 1e6, "rope_scaling": None}, (1e6, None, 1e4)),
    "transformers 5": (
        {"rope_parameters": {"full_attention": FULL, "sliding_attention": SLIDING}},
        (5e5, LinearRope(2.0), 3e4),
    ),
    "transformers 5, one of them": ({"rope_parameters": {"sliding_attention": SLIDING}}, (1e6, None, 3e4)),
    "both": ({"rope_parameters": {"full_attention": FULL}, "rope_local_base_freq": 2e4}, (5e5, LinearRope(2.0), 2e4)),
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_ropes_are_those_of_transformers(spelling: str) -> None:
    from transformers import AutoConfig

    fields, (base, scaling, sliding) = SPELLINGS[spelling]
    config = config_from_hf({**BASE, **fields})
    assert (config.rotary_base, config.rope_scaling, config.sliding_rotary_base) == (base, scaling, sliding)
    theirs = AutoConfig.for_model(**{**BASE, **fields}).to_dict()
    assert replace(config_from_hf(theirs), hf_config={}) == replace(config, hf_config={})
    assert McaModelConfig.from_dict(config.to_dict()) == config


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_spelling_stays_unless_asked(spelling: str) -> None:
    hf = {**BASE, **SPELLINGS[spelling][0]}
    assert FAMILIES["gemma3_text"].config_to_hf(config_from_hf(hf)) == hf


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("major", [4, 5])
@pytest.mark.parametrize("changes", [{}, {"sliding_rotary_base": 7e4}, {"rotary_base": 2e6, "rope_scaling": None}])
def test_ropes_are_written_where_the_release_reads_them(spelling: str, major: int, changes: dict[str, Any]) -> None:
    hf = {**BASE, **SPELLINGS[spelling][0]}
    config = replace(config_from_hf(hf), **changes)
    written = FAMILIES["gemma3_text"].config_to_hf(config, major)
    assert replace(config_from_hf(written), hf_config=config.hf_config) == config
    flat, nested = {"rope_theta", "rope_scaling", "rope_local_base_freq"} & set(written), written.get("rope_parameters")
    if major == 5 and written != BASE:
        assert (flat, nested.keys()) == (set(), {"full_attention", "sliding_attention"})
    if major == 4:
        assert nested is None


REFUSED = {
    "one rope for all": ({"rope_parameters": FULL}, "rope_parameters.factor is not supported"),
    "a scaled second rope": (
        {"rope_parameters": {"sliding_attention": FULL}},
        "rope_parameters.sliding_attention.rope_type='linear'",
    ),
    "two bases": (
        {"rope_parameters": {"sliding_attention": SLIDING}, "rope_local_base_freq": 1e4},
        "rope_local_base_freq are both given and differ",
    ),
    "a factor of cos and sin": (
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}},
        "YarnRope is not supported where layers with a window have a rope of their own",
    ),
    "a base that is no number": (
        {"rope_parameters": {"sliding_attention": {"rope_theta": "1e4"}}},
        "rope_parameters.sliding_attention.rope_theta='1e4'",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_rope_that_is_not_carried_over_is_refused_by_name(case: str) -> None:
    fields, message = REFUSED[case]
    with pytest.raises(ModelError, match=message) as error:
        config_from_hf({**BASE, **fields})
    assert "\n" not in str(error.value)


def test_scaling_that_transformers_takes_where_gpt_oss_gives_none() -> None:
    from transformers import AutoConfig

    base, family = BASES["gpt_oss"], FAMILIES["gpt_oss"]
    yarn = YarnRope(32.0, 4096, truncate=False)
    for fields in ({}, {"rope_theta": 2e5}, {"rope_scaling": None}):
        config = config_from_hf({**base, **fields})
        assert config.rope_scaling == yarn
        theirs = config_from_hf(AutoConfig.for_model(**{**base, **fields}).to_dict())
        assert (theirs.rope_scaling, theirs.rotary_base) == (config.rope_scaling, config.rotary_base)
        assert family.config_to_hf(config) == {**base, **fields}
    for rope in ({"rope_type": "default", "rope_theta": 1e4}, {}):
        plain = config_from_hf({**base, "rope_parameters": rope})
        theirs = config_from_hf(AutoConfig.for_model(**{**base, "rope_parameters": dict(rope)}).to_dict())
        assert (plain.rope_scaling, plain.rotary_base) == (None, theirs.rotary_base)
        check_config(plain)
