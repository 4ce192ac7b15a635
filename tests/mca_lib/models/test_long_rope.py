"""LongRoPE of Phi-3: read as transformers reads it, written back, refused by name where it cannot be."""

from dataclasses import replace
from typing import Any

import pytest

from mca_lib.errors import ConfigError, ModelError
from mca_lib.models.config import HybridLayers, LongRope, McaModelConfig
from mca_lib.models.layout import Layout
from mca_lib.models.layout_rules import check_config_layout
from mca_lib.models.registry import FAMILIES, config_from_hf
from tests.mca_lib.models.test_registry import BASES

SHORT, LONG = [1.0 + i / 48 for i in range(48)], [1.0 + i for i in range(48)]
MINI_128K = {
    "architectures": ["Phi3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "auto_map": {
        "AutoConfig": "configuration_phi3.Phi3Config",
        "AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM",
    },
    "bos_token_id": 1,
    "embd_pdrop": 0.0,
    "eos_token_id": 32000,
    "hidden_act": "silu",
    "hidden_size": 3072,
    "initializer_range": 0.02,
    "intermediate_size": 8192,
    "max_position_embeddings": 131072,
    "model_type": "phi3",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "original_max_position_embeddings": 4096,
    "pad_token_id": 32000,
    "resid_pdrop": 0.0,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {"long_factor": LONG, "short_factor": SHORT, "type": "longrope"},
    "rope_theta": 10000.0,
    "sliding_window": 262144,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.40.2",
    "use_cache": True,
    "vocab_size": 32064,
}
"""Public hyper-parameters, with factors of our own."""
MINI_4 = {
    **MINI_128K,
    "auto_map": {**MINI_128K["auto_map"], "AutoTokenizer": "Xenova/gpt-4o"},
    "num_attention_heads": 24,
    "num_key_value_heads": 8,
    "partial_rotary_factor": 0.75,
    "tie_word_embeddings": True,
    "vocab_size": 200064,
}


def with_rope(hf: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {**hf, "rope_scaling": {**hf["rope_scaling"], **changes}}


SPELLINGS = {
    "Phi-3-mini-128k": MINI_128K,
    "its first release": with_rope(MINI_128K, type="su", original_max_position_embeddings=4096),
    "of a part of the head": MINI_4,
    "a factor": with_rope(MINI_128K, factor=8.0),
    "an attention factor": with_rope(MINI_128K, attention_factor=1.5),
    "no longer than before": {**MINI_128K, "max_position_embeddings": 4096},
}


def frequencies(hf: dict[str, Any]) -> tuple[Any, Any]:
    """(short, long, factor) of transformers, and ours."""
    from copy import deepcopy

    import torch
    from transformers import AutoConfig
    from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding

    from mca_lib.models.rotary import attention_factor, long_frequencies, model_frequencies

    theirs, config = Phi3RotaryEmbedding(AutoConfig.for_model(**deepcopy(hf))), config_from_hf(hf)
    found = []
    for length in (4096, 4097):
        theirs(torch.zeros(1), torch.tensor([[length - 1]]))
        found.append(theirs.inv_freq.tolist())
    ours = (f(config).tolist() for f in (model_frequencies, long_frequencies))
    return (*found, theirs.attention_scaling), (*ours, attention_factor(config.rope_scaling))


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_frequencies_are_transformers_on_both_sides_of_the_length(ranks: Any, spelling: str) -> None:
    ((theirs, ours),) = ranks(1, frequencies, SPELLINGS[spelling])
    assert ours == theirs
    assert ours[0] != ours[1]


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("major", [4, 5, None])
def test_every_spelling_is_written_back(spelling: str, major: int | None) -> None:
    hf, family = SPELLINGS[spelling], FAMILIES["phi3"]
    config = config_from_hf(hf)
    written = family.config_to_hf(config, major)
    assert replace(config_from_hf(written), hf_config=hf) == config
    assert McaModelConfig.from_dict(config.to_dict()) == config
    if major is None:
        assert written == hf
    changed = replace(config, rope_scaling=replace(config.rope_scaling, long_factor=(2.0,) * 48))
    again = config_from_hf(family.config_to_hf(changed, major))
    assert (again.rope_scaling, again.rotary_channels) == (changed.rope_scaling, config.rotary_channels)


@pytest.mark.parametrize(
    ("hf", "message"),
    [
        (with_rope(MINI_128K, type="linear", factor=2.0), "rope_type='linear' is not supported; use default, longrope"),
        (with_rope(MINI_128K, long_factor=LONG[:-1]), "long_factor has 47 factors, and 96 channels of a head rotate"),
        (with_rope(MINI_4, short_factor=SHORT[:-1]), "short_factor has 47 factors, and 96 channels of a head rotate"),
        (with_rope(MINI_128K, short_factor=None), "rope_scaling.short_factor is missing"),
        (with_rope(MINI_128K, long_factor=["1"] * 48), "rope_scaling.long_factor="),
        (with_rope(MINI_128K, original_max_position_embeddings=8), "are both given and differ"),
        ({**MINI_128K, "auto_map": {"AutoModelForCausalLM": "modeling_mine.Mine"}}, "auto_map"),
    ],
)
def test_what_cannot_be_is_one_line(hf: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message) as error:
        config_from_hf(hf)
    assert "\n" not in str(error.value)


def test_padding_of_context_parallelism_makes_no_document_long() -> None:
    config = config_from_hf(MINI_128K)
    assert isinstance(config.rope_scaling, LongRope)
    check_config_layout(config, Layout(context=2))
    odd = replace(config, rope_scaling=replace(config.rope_scaling, original_max_position_embeddings=4098))
    with pytest.raises(ConfigError, match=r"parallel\.context=2: .*original_max_position_embeddings=4098"):
        check_config_layout(odd, Layout(context=2))


def test_other_families_have_no_longrope() -> None:
    rope = {**MINI_128K["rope_scaling"], "original_max_position_embeddings": 4096}
    with pytest.raises(ModelError, match="rope_type='longrope' is not supported"):
        config_from_hf({**BASES["llama"], "rope_scaling": rope})


def test_no_hybrid_has_it() -> None:
    """Neither one made of a transformer, nor one that a checkpoint's mca_config.json asks for."""
    config = config_from_hf(MINI_128K)
    with pytest.raises(ConfigError, match=r"^checkpoint\.pattern: a transformer with LongRoPE cannot become a hybrid"):
        config.with_hybrid(HybridLayers("*-" * 32), "checkpoint.pattern")
    with pytest.raises(ModelError, match=r"^model config: a hybrid has no LongRoPE \(rope_scaling\)$"):
        replace(config, hybrid=HybridLayers("*-" * 16))
