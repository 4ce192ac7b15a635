"""Numbers that an argument may have; a recipe's sections have bounds of their own.

Beyond these a training would end in an assertion of a library, or train something that nobody asked for: a negative
number of epochs as one step, a clipping threshold of NaN as none.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

from mca_lib.errors import ConfigError


class Range(NamedTuple):
    """Which numbers, in words and as a test that NaN does not pass."""

    words: str
    holds: Callable[[float], bool]


_COUNT = Range("a number of at least 1", lambda value: value >= 1)
_POSITIVE = Range("a finite number above 0", lambda value: 0 < value < math.inf)
_FROM_0 = Range("a finite number of at least 0", lambda value: 0 <= value < math.inf)
_BELOW_1 = Range("a number from 0 to below 1", lambda value: 0 <= value < 1)
_SEED = Range("a number from 0 to 2147483647", lambda value: 0 <= value < 2**31)

RANGES = {
    "global_batch_size": _COUNT,
    "per_device_train_batch_size": _COUNT,
    "per_device_eval_batch_size": _COUNT,
    "gradient_accumulation_steps": _COUNT,
    "num_train_epochs": _POSITIVE,
    "learning_rate": _POSITIVE,
    "min_learning_rate": _FROM_0,
    "weight_decay": _FROM_0,
    "adam_beta1": _BELOW_1,
    "adam_beta2": _BELOW_1,
    "adam_epsilon": _POSITIVE,
    "max_grad_norm": _FROM_0,
    "moe_aux_loss_coeff": _FROM_0,
    "moe_z_loss_coeff": _FROM_0,
    "moe_router_bias_update_rate": _FROM_0,
    "mtp_loss_weight": _FROM_0,
    "seed": _SEED,
    "save_total_limit": _FROM_0,
    "save_keep_every": _FROM_0,
}
"""Name of an argument → its numbers; None, where it is the default, says that there is none."""


def check_ranges(args: object) -> None:
    """Raise ConfigError for the first argument that is no number or beyond its range."""
    for name, allowed in RANGES.items():
        value = getattr(args, name)
        if value is None:
            continue
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not (is_number and allowed.holds(value)):
            raise ConfigError(f"{name}={value!r}: use {allowed.words}")
