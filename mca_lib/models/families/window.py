"""Sliding windows as Hugging Face configs spell them: one rule per way in which a family reads its fields.

A rule reads (window, layers without it) as transformers does, where absent, null and false mean different things,
and writes them back. Window: tokens that a query sees, its own included; None where no layer has one.
"""

import operator
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mca_lib.errors import ModelError

HfConfig = dict[str, Any]
Window = tuple[int | None, tuple[int, ...]]

FULL: Window = (None, ())
_TYPES = {"full_attention", "sliding_attention"}


class WindowRule(ABC):
    """How a family spells its windows."""

    @abstractmethod
    def read(self, hf: HfConfig) -> Window:
        """(window, layers without it). Raises ModelError naming the field that cannot be carried over."""

    @abstractmethod
    def spell(self, window: Window, hf: HfConfig) -> HfConfig:
        """Fields that say this window. Raises ModelError where the family has no words for it."""

    def write(self, hf: HfConfig, window: Window) -> HfConfig:
        """`hf` with this window; untouched where it says so already."""
        return hf if self.read(hf) == window else hf | self.spell(window, hf)


@dataclass(frozen=True)
class NoWindow(WindowRule):
    """The family's attention is full; fields of windows are accepted where they switch nothing on."""

    def read(self, hf: HfConfig) -> Window:
        if hf.get("use_sliding_window"):
            raise _unsupported(hf, "use_sliding_window", "false")
        if set(_layer_types(hf) or ()) - {"full_attention"}:
            raise _unsupported(hf, "layer_types", "full_attention in every layer")
        return FULL

    def spell(self, window: Window, hf: HfConfig) -> HfConfig:
        raise ModelError(f"model config: sliding_window={window[0]}: {hf.get('model_type')} has no sliding windows")


@dataclass(frozen=True)
class OneWindow(WindowRule):
    """All layers have the window of `sliding_window`; null is none."""

    default: int | None
    """transformers' value where the field is absent."""

    def read(self, hf: HfConfig) -> Window:
        window = _size(hf, self.default)
        expected = "full_attention" if window is None else "sliding_attention"
        if hf.get("use_sliding_window") not in (None, window is not None):
            # transformers does not read the field here, and other programs do.
            raise _unsupported(hf, "use_sliding_window", f"absent, as sliding_window={window} decides")
        if set(_layer_types(hf) or ()) - {expected}:
            raise _unsupported(hf, "layer_types", f"{expected} in every layer, as sliding_window={window} decides")
        return window, ()

    def spell(self, window: Window, hf: HfConfig) -> HfConfig:
        if window[1]:
            raise ModelError(f"model config: full_attention_layers: in {hf.get('model_type')} all layers are alike")
        return {"sliding_window": window[0]}


@dataclass(frozen=True)
class SwitchedWindow(WindowRule):
    """`use_sliding_window` switches the window on, in the layers that `layer_types` says.

    Without `layer_types` those are the layers that `windowed` says, given `max_window_layers`: those from there on; or
    all of them where the family has no such field (`by_layer` false).
    """

    by_layer: bool = True
    windowed: Callable[[int, int], bool] = operator.ge
    """(number of a layer, `max_window_layers`) → does it have the window?"""
    default: int = 4096
    default_max_window_layers: int = 28

    def read(self, hf: HfConfig) -> Window:
        window = _size(hf, self.default) if hf.get("use_sliding_window") else None
        if not self.by_layer:
            if set(_layer_types(hf) or ()) - {"full_attention" if window is None else "sliding_attention"}:
                raise _unsupported(hf, "layer_types", "absent, as transformers does not read it here")
            return window, ()
        types = _layer_types(hf)
        if types is None:
            first = hf.get("max_window_layers")
            first = self.default_max_window_layers if first is None else first
            types = [
                "sliding_attention" if window is not None and self.windowed(i, first) else "full_attention"
                for i in range(hf["num_hidden_layers"])
            ]
        if "sliding_attention" not in types:
            return FULL
        if window is None:
            raise _unsupported(hf, "layer_types", "full_attention in every layer, as use_sliding_window is not set")
        return window, tuple(i for i, kind in enumerate(types) if kind == "full_attention")

    def spell(self, window: Window, hf: HfConfig) -> HfConfig:
        size, full = window
        if size is None:
            return {"use_sliding_window": False} | ({"layer_types": None} if hf.get("layer_types") else {})
        fields: HfConfig = {"use_sliding_window": True, "sliding_window": size}
        if self.by_layer:
            layers = range(hf["num_hidden_layers"])
            fields["layer_types"] = ["full_attention" if i in full else "sliding_attention" for i in layers]
        elif full:
            raise ModelError(f"model config: full_attention_layers: in {hf.get('model_type')} all layers are alike")
        return fields


@dataclass(frozen=True)
class PeriodicWindow(WindowRule):
    """All layers have the window of `sliding_window` but those that `layer_types` says, or else every N-th."""

    default: int
    period: int
    """N where the config gives none."""
    period_field: str | None = None
    """The field that gives it."""

    def read(self, hf: HfConfig) -> Window:
        window, types = _size(hf, self.default), _layer_types(hf)
        if types is None:
            period = (hf.get(self.period_field) if self.period_field else None) or self.period
            full = tuple(i for i in range(hf["num_hidden_layers"]) if (i + 1) % period == 0)
        else:
            full = tuple(i for i, kind in enumerate(types) if kind == "full_attention")
        if len(full) == hf["num_hidden_layers"]:
            return FULL
        if window is None:
            raise _unsupported(hf, "sliding_window", "a number of tokens, as layer_types has sliding_attention")
        return window, full

    def spell(self, window: Window, hf: HfConfig) -> HfConfig:
        size, full = window
        layers = range(hf["num_hidden_layers"])
        if size is None:
            return {"layer_types": ["full_attention" for _ in layers]}
        return {
            "sliding_window": size,
            "layer_types": ["full_attention" if i in full else "sliding_attention" for i in layers],
        }


def _size(hf: HfConfig, default: int | None) -> int | None:
    window = hf.get("sliding_window", default)
    if window == 0:
        raise _unsupported(hf, "sliding_window", "1 token or more, or null")
    return window


def _layer_types(hf: HfConfig) -> list[str] | None:
    types = hf.get("layer_types")
    if types is None:
        return None
    if unknown := sorted(set(types) - _TYPES):
        raise _unsupported(hf, "layer_types", f"full_attention or sliding_attention, not {unknown[0]!r}")
    if len(types) != hf.get("num_hidden_layers"):
        raise ModelError(
            f"config.json: layer_types has {len(types)} entries, num_hidden_layers is {hf.get('num_hidden_layers')}"
        )
    return types


def _unsupported(hf: HfConfig, field: str, accepted: str) -> ModelError:
    return ModelError(
        f"config.json: {field}={hf.get(field)!r:.80} is not supported for model type {hf.get('model_type')!r}; "
        f"it must be {accepted}"
    )


NO_WINDOW = NoWindow()
