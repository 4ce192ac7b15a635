"""Types of the fields of a Hugging Face config, as transformers 5 enforces them, and narrower where Megatron is.

A wrong one surfaces here with the field's name, and not as an internal error in the middle of a conversion.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mca_lib.errors import ModelError

_DTYPES = ("float32", "bfloat16", "float16", "float64")
_SIZES = ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")
_OPTIONAL_SIZES = (
    *("num_key_value_heads", "head_dim"),
    *("n_routed_experts", "num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size"),
    *("decoder_sparse_step", "full_attention_interval"),
    *("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim"),
    "linear_conv_kernel_dim",
    *("mamba_num_heads", "mamba_head_dim", "ssm_state_size", "n_groups", "conv_kernel", "chunk_size"),
    *("mamba_state_size", "mamba_num_groups", "mamba_conv_kernel", "mamba_chunk_size"),
    *("moe_shared_expert_intermediate_size", "rotary_dim"),
    *("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
)
_COUNTS = (
    *("num_experts", "num_local_experts", "first_k_dense_replace"),
    *("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers"),
)
_FLAGS = (
    *("tie_word_embeddings", "attention_bias", "attention_out_bias", "mlp_bias", "qkv_bias", "use_qk_norm"),
    "use_cache",
)
_DROPOUTS = ("attention_dropout", "residual_dropout", "resid_pdrop")
_ROPES = ("rope_parameters", "rope_scaling")
_ROPE_NUMBERS = (
    *("rope_theta", "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    *("beta_fast", "beta_slow", "attention_factor"),
)


@dataclass(frozen=True)
class Kind:
    """What the value of a field must be."""

    words: str
    holds: Callable[[Any], bool]
    nullable: bool = True
    """null stands for transformers' default."""


def _whole(value: Any) -> bool:
    return type(value) is int


def _number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _not_negative(value: Any) -> bool:
    return _number(value) and value >= 0


def _texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _positives(value: Any) -> bool:
    return isinstance(value, list) and all(_number(item) and item > 0 for item in value)


def _token_ids(value: Any) -> bool:
    return _whole(value) or (isinstance(value, list) and all(_whole(item) for item in value))


_SIZE = Kind("a positive integer", lambda v: _whole(v) and v > 0)
_COUNT = Kind("an integer, 0 or more", lambda v: _whole(v) and v >= 0)
_POSITIVE = Kind("a positive number", lambda v: _number(v) and v > 0)
_OBJECT = Kind("an object", lambda v: isinstance(v, dict))
_TOKEN = Kind("an integer", _whole)
_DTYPE = Kind("one of " + ", ".join(_DTYPES), lambda v: v in _DTYPES)

_EPSILON = Kind(
    "a positive number with a decimal point or an exponent",
    lambda v: type(v) is float and math.isfinite(v) and v > 0,
    nullable=False,
)

FIELD_TYPES: dict[str, Kind] = {
    **dict.fromkeys((*_SIZES, *_OPTIONAL_SIZES), _SIZE),
    # Tables have a row for each; a damaged number would fill the memory.
    "num_hidden_layers": Kind("a positive integer less than 100000", lambda v: _SIZE.holds(v) and v < 100_000),
    "max_position_embeddings": Kind(_SIZE.words, _SIZE.holds, nullable=False),
    **dict.fromkeys(_COUNTS, _COUNT),
    "mlp_only_layers": Kind("a list of numbers of layers", lambda v: isinstance(v, list) and all(map(_whole, v))),
    # To transformers 5 null is an error; other programs take it for no groups, or no shared expert.
    **dict.fromkeys(("n_group", "topk_group"), Kind(_SIZE.words, _SIZE.holds, nullable=False)),
    "n_shared_experts": Kind(_COUNT.words, _COUNT.holds, nullable=False),
    "norm_topk_prob": Kind("true or false", lambda v: isinstance(v, bool)),
    "router_aux_loss_coef": Kind("a number, 0 or more", _not_negative),
    **dict.fromkeys(("routed_scaling_factor", "swiglu_limit"), _POSITIVE),
    "auto_map": _OBJECT,
    **dict.fromkeys(_FLAGS, Kind("true or false", lambda v: isinstance(v, bool), nullable=False)),
    **dict.fromkeys(_ROPES, _OBJECT),
    **dict.fromkeys(("rope_theta", "rope_local_base_freq"), _POSITIVE),
    **dict.fromkeys(("query_pre_attn_scalar", "sliding_window_pattern"), _SIZE),
    "partial_rotary_factor": _POSITIVE,
    "original_max_position_embeddings": _SIZE,
    "sliding_window": Kind("a number of tokens", lambda v: _whole(v) and v >= 0),
    "use_sliding_window": Kind("true or false", lambda v: isinstance(v, bool)),
    "max_window_layers": Kind("a number of layers", lambda v: _whole(v) and v >= 0),
    **dict.fromkeys(("rms_norm_eps", "layer_norm_epsilon", "mamba_norm_eps"), _EPSILON),
    "initializer_range": Kind(
        "a number from 0.0 to 1.0 with a decimal point", lambda v: type(v) is float and 0 <= v <= 1, nullable=False
    ),
    **dict.fromkeys(_DROPOUTS, Kind("a number from 0 to less than 1", lambda v: _number(v) and 0 <= v < 1)),
    "eos_token_id": Kind("an integer or a list of integers", _token_ids),
    "bos_token_id": _TOKEN,
    "pad_token_id": _TOKEN,
    "dtype": _DTYPE,
    "torch_dtype": _DTYPE,
    "hidden_act": Kind("a text", lambda v: isinstance(v, str)),
    "architectures": Kind("a list of texts", _texts),
    "layer_types": Kind("a list of texts", _texts),
}

ROPE_TYPES: dict[str, Kind] = {
    **dict.fromkeys((*_ROPE_NUMBERS, "partial_rotary_factor"), _POSITIVE),
    **dict.fromkeys(("mscale", "mscale_all_dim"), Kind("a number, 0 or greater", lambda v: _number(v) and v >= 0)),
    **dict.fromkeys(("rope_type", "type"), Kind("a text", lambda v: isinstance(v, str))),
    **dict.fromkeys(("short_factor", "long_factor"), Kind("a list of positive numbers", _positives)),
    # null is false to transformers, where absent is true.
    "truncate": Kind("true or false", lambda v: isinstance(v, bool), nullable=False),
}
"""Fields of `rope_parameters` and `rope_scaling`."""


def check_types(hf: dict[str, Any]) -> None:
    """Raise ModelError naming the first field of a config.json whose value is of another kind; absent ones pass."""
    for name, kind in FIELD_TYPES.items():
        if name in hf:
            _check(name, hf[name], kind)
    for rope in _ROPES:
        given = hf.get(rope) or {}
        nested = {f"{rope}.{layers}": value for layers, value in given.items() if isinstance(value, dict)}
        for where, values in {rope: given, **nested}.items():
            for name, kind in ROPE_TYPES.items():
                if name in values:
                    _check(f"{where}.{name}", values[name], kind)


def _check(name: str, value: Any, kind: Kind) -> None:
    if (value is None and kind.nullable) or (value is not None and kind.holds(value)):
        return
    shown = "null" if value is None else repr(value)
    raise ModelError(f"config.json: {name}={shown:.80} cannot be used; it must be {kind.words}")
