"""Sliding windows: read as transformers reads them, per family, written back, and applied as its mask."""

import itertools
from dataclasses import replace
from typing import Any

import pytest

from mca_lib.errors import ModelError
from mca_lib.models.registry import FAMILIES, config_from_hf
from tests.mca_lib.models.test_registry import BASES

_MIXED = ["sliding_attention", "full_attention", "full_attention"] * 2
SPELLINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "mistral, absent": ("mistral", {}),
    "mistral, null": ("mistral", {"sliding_window": None}),
    "mistral, a number": ("mistral", {"sliding_window": 7}),
    "mistral, as transformers 4 saves v0.3": ("mistral", {"sliding_window": None, "rope_theta": 1e6}),
    "mixtral, absent": ("mixtral", {}),
    "mixtral, a number": ("mixtral", {"sliding_window": 7}),
    "qwen2, switched off": ("qwen2", {"sliding_window": 32, "use_sliding_window": False, "max_window_layers": 2}),
    "qwen2, switch absent": ("qwen2", {"sliding_window": 32, "max_window_layers": 2}),
    "qwen2, from a layer on": ("qwen2", {"sliding_window": 32, "use_sliding_window": True, "max_window_layers": 2}),
    "qwen2, default window": ("qwen2", {"use_sliding_window": True, "max_window_layers": 0}),
    "qwen2, null window": ("qwen2", {"use_sliding_window": True, "sliding_window": None, "max_window_layers": 0}),
    "qwen2, default layers": ("qwen2", {"use_sliding_window": True}),
    "qwen3, layer types": (
        "qwen3",
        {"use_sliding_window": True, "sliding_window": 9, "layer_types": _MIXED},
    ),
    "qwen3, layer types switched off": ("qwen3", {"sliding_window": 9, "layer_types": ["full_attention"] * 6}),
    "qwen3_moe, switched off": ("qwen3_moe", {"sliding_window": 9}),
    "qwen3_moe, switched on": ("qwen3_moe", {"sliding_window": 9, "use_sliding_window": True}),
    "llama, a field that it does not read": ("llama", {"sliding_window": 9}),
}


def windows_of_transformers(hf: dict[str, Any]) -> list[int | None]:
    """Window of each layer of transformers' model, from its config class."""
    from transformers import AutoConfig

    config = AutoConfig.for_model(**hf)
    if config.model_type == "llama":
        return [None] * config.num_hidden_layers
    types = getattr(config, "layer_types", None) or ["sliding_attention"] * config.num_hidden_layers
    return [config.sliding_window if kind == "sliding_attention" else None for kind in types]


@pytest.mark.parametrize("case", SPELLINGS)
def test_each_layer_has_transformers_window(case: str) -> None:
    model_type, fields = SPELLINGS[case]
    hf = {**BASES[model_type], **fields}
    config = config_from_hf(hf)
    windows = [None if i in config.full_attention_layers else config.sliding_window for i in range(config.num_layers)]
    assert windows == windows_of_transformers(hf)
    assert FAMILIES[model_type].config_to_hf(config) == hf


@pytest.mark.parametrize(
    ("model_type", "window", "full"),
    [
        ("mistral", 5, ()),
        ("mistral", None, ()),
        ("mixtral", 5, ()),
        ("qwen2", 5, (1, 2)),
        ("qwen2", None, ()),
        ("qwen3", 5, (0, 5)),
        ("qwen3_moe", 5, ()),
    ],
)
@pytest.mark.parametrize("source", [{}, {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 2}])
def test_changed_window_reaches_the_hf_config(
    model_type: str, window: int | None, full: tuple[int, ...], source: dict[str, Any]
) -> None:
    if model_type in ("mistral", "mixtral"):
        source = {k: v for k, v in source.items() if k == "sliding_window"}
    config = config_from_hf({**BASES[model_type], **source})
    config = replace(config, sliding_window=window, full_attention_layers=full)
    hf = FAMILIES[model_type].config_to_hf(config)
    again = config_from_hf(hf)
    assert (again.sliding_window, again.full_attention_layers) == (window, full)
    assert windows_of_transformers(hf) == [None if i in full else window for i in range(6)]


REFUSED = {
    "a window that a family lacks": ("llama", {"use_sliding_window": True}, "use_sliding_window"),
    "layer types that a family lacks": ("llama", {"layer_types": ["sliding_attention"] * 6}, "layer_types"),
    "layer types against the window": ("mistral", {"layer_types": ["full_attention"] * 6}, "layer_types"),
    "a switch against the window": ("mistral", {"use_sliding_window": False}, "use_sliding_window"),
    "layers that slide without a window": ("qwen3", {"layer_types": _MIXED}, "layer_types"),
    "a kind of attention": ("qwen3", {"layer_types": ["chunked_attention"] * 6}, "not 'chunked_attention'"),
    "layers that are not there": (
        "qwen3",
        {"layer_types": _MIXED[:5]},
        "layer_types has 5 entries, num_hidden_layers is 6",
    ),
    "no tokens": ("mistral", {"sliding_window": 0}, "sliding_window=0"),
    "a negative number": ("mistral", {"sliding_window": -1}, "sliding_window=-1"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_window_that_is_not_carried_over_is_refused_by_name(case: str) -> None:
    model_type, fields, message = REFUSED[case]
    with pytest.raises(ModelError, match=message) as error:
        config_from_hf({**BASES[model_type], **fields})
    assert "\n" not in str(error.value)


def test_megatron_has_the_window_of_each_layer(ranks: Any) -> None:
    """`window_size` counts tokens to the left of the query; Transformer Engine takes it from there."""
    config = {**BASES["qwen2"], "use_sliding_window": True, "sliding_window": 9, "max_window_layers": 4}
    assert ranks(1, megatron_windows, config) == [[None] * 4 + [(8, 0)] * 2]
    assert ranks(1, megatron_windows, {**BASES["mistral"], "sliding_window": 9}) == [[(8, 0)] * 6]


def megatron_windows(hf: dict[str, Any]) -> list[tuple[int, int] | None]:
    from megatron.core.transformer.utils import is_layer_window_attention

    from mca_lib.models.transformer_config import transformer_config

    config = transformer_config(config_from_hf(hf))
    return [
        config.window_size
        if is_layer_window_attention(config.window_size, config.window_attn_skip_freq, number)
        else None
        for number in range(1, config.num_layers + 1)
    ]


def test_mask_is_transformers(ranks: Any) -> None:
    """Every query sees the 7 tokens that end with its own, whatever lies before the first query."""
    assert ranks(1, shapes_with_another_mask, 7) == [[]]


def shapes_with_another_mask(window: int) -> list[tuple[int, int]]:
    """(queries, tokens before them) where the keys that a query sees are not those of transformers' mask.

    Values that are unit vectors show which keys have a share: with equal scores, all that are seen.
    """
    import torch
    from transformers.masking_utils import sliding_window_causal_mask_function

    core, differing = core_attention(window), []
    visible = sliding_window_causal_mask_function(window)
    for queries, before in itertools.product((1, 6, 7, 8, 14, 15, 40), (0, 3, 9)):
        total = before + queries
        query, key = torch.zeros(queries, 1, 1, 4), torch.zeros(total, 1, 1, 4)
        seen = core._attend(query, key, torch.eye(total)[:, None, None, :])[:, 0, 0] > 0
        places = torch.arange(total)
        expected = [[bool(visible(0, 0, q, k)) for k in places] for q in places[before:]]
        if seen.tolist() != expected:
            differing.append((queries, before))
    return differing


def core_attention(window: int) -> Any:
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.enums import AttnMaskType

    from mca_lib.models.attention import SDPACoreAttention
    from mca_lib.parallel import DistributingParallelArguments, initialize_model_parallel

    initialize_model_parallel(DistributingParallelArguments())
    config = TransformerConfig(
        num_layers=1, hidden_size=4, num_attention_heads=1, window_size=(window - 1, 0), attention_dropout=0.0
    )
    return SDPACoreAttention(config, 1, AttnMaskType.causal, "self")


def test_document_within_the_window_keeps_the_kernel_without_a_mask(ranks: Any) -> None:
    assert ranks(1, masks_built, 7) == [{5: [None], 7: [None], 8: [None, (1, 7)], 20: [None, (7, 13), (6, 12)]}]


def masks_built(window: int) -> dict[int, list[tuple[int, int] | None]]:
    """Length of a document → shapes of the masks that its attention takes."""
    import torch

    core, taken = core_attention(window), []
    original = torch.nn.functional.scaled_dot_product_attention

    def spy(*args: Any, attn_mask: Any = None, **kwargs: Any) -> Any:
        taken.append(None if attn_mask is None else tuple(attn_mask.shape))
        return original(*args, attn_mask=attn_mask, **kwargs)

    torch.nn.functional.scaled_dot_product_attention = spy
    shapes = {}
    for length in (5, 7, 8, 20):
        core._attend(*(torch.zeros(length, 1, 1, 4) for _ in range(3)))
        shapes[length], taken[:] = list(taken), []
    return shapes
