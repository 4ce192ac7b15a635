"""Rows of other data sets for Megatron-Core, which is given labels that are shifted already. No torch."""

from collections.abc import Callable, Mapping
from typing import Any


def data_collator_wrapper(
    data_collator: Callable[[list[dict[str, Any]]], Mapping[str, Any]],
) -> Callable[[list[dict[str, Any]]], Mapping[str, Any]]:
    """Shift for next-token prediction, before collating: labels lose their first token, all else its last.

    Megatron-Core compares logits at s with labels at s, while transformers' models shift by themselves. Rows of a
    token store are shifted already and must not come here.
    """

    def wrapper(features: list[dict[str, Any]]) -> Mapping[str, Any]:
        shifted = [
            {name: values[1:] if name == "labels" else values[:-1] for name, values in feature.items()}
            for feature in features
        ]
        return data_collator(shifted)

    return wrapper
