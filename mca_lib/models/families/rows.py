"""Rows of a family's config table, and the tensors that a source may hold twice. No torch."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mca_lib.errors import ModelError

REQUIRED = object()
"""Default of a config field that the source must give."""

HfConfig = dict[str, Any]


@dataclass(frozen=True)
class Field:
    """A field of the Hugging Face config and the fields of `McaModelConfig` that carry it, dotted for a part's."""

    hf: str
    mca: str | tuple[str, ...]
    default: Any = REQUIRED
    """transformers' default: a value, or a function of the Hugging Face config."""
    aliases: tuple[str, ...] = ()
    """Other names that transformers reads the field from."""
    null: Any = None
    """What null stands for, where that is not the default: a value or a function likewise."""
    layers: str | None = None
    """Symbol of the hybrid layers that have the field; None: all models have it."""

    @property
    def targets(self) -> tuple[str, ...]:
        return (self.mca,) if isinstance(self.mca, str) else self.mca

    def read(self, hf: HfConfig) -> Any:
        """Value in a Hugging Face config. Raises ModelError when it is required and absent."""
        given = {name: hf[name] for name in (self.hf, *self.aliases) if hf.get(name) is not None}
        if given:
            (name, value), *others = given.items()
            if conflict := [n for n, v in others if v != value]:
                raise ModelError(f"config.json: {name}={value} and {conflict[0]}={hf[conflict[0]]} differ; keep one")
            return value
        if self.default is REQUIRED:
            raise ModelError(f"config.json: {self.hf} is missing")
        default = self.null if self.null is not None and self.spelling(hf) in hf else self.default
        return default(hf) if callable(default) else default

    def spelling(self, hf: HfConfig) -> str:
        """The name under which a Hugging Face config has the field, or would have it."""
        return next((name for name in (self.hf, *self.aliases) if name in hf), self.hf)


@dataclass(frozen=True)
class Neutral:
    """A Hugging Face field that changes the mathematics and has no counterpart: only these values are accepted."""

    hf: str
    accepted: tuple[Any, ...]
    unless: Callable[[HfConfig], bool] | None = None
    """The field has no effect, and any value passes, when this holds."""
    null_is_absent: bool = True
    """To transformers null is the default; false where it takes null for false, and the default is true."""

    def check(self, hf: HfConfig) -> None:
        """Raises ModelError naming the field."""
        value = hf.get(self.hf)
        if value is None and (self.null_is_absent or self.hf not in hf):
            return
        if value in self.accepted or (self.unless is not None and self.unless(hf)):
            return
        accepted = " or ".join(repr(v) for v in self.accepted) or "absent"
        raise ModelError(
            f"config.json: {self.hf}={short(value)} is not supported for model type {hf.get('model_type')!r}; "
            f"it must be {accepted}"
        )


def publishers_code(module: str) -> Neutral:
    """Accepts an `auto_map` that names the publisher's code of the model, of which transformers has its own version.

    Args:
        module: part of the names of its classes.
    """

    def is_its(hf: HfConfig) -> bool:
        # What names a tokenizer, as Phi-4-mini does that of another repository, is not about the model.
        return all(module in str(name) for auto, name in hf["auto_map"].items() if auto != "AutoTokenizer")

    return Neutral("auto_map", (), unless=is_its)


@dataclass(frozen=True)
class Copy:
    """A tensor that a source may store a second time. An export writes it where the source had it."""

    hf: str
    """Its name; with `{layer}`, one for every multi-token prediction layer."""
    of: str
    """The tensor that it must equal."""
    when: str | None = None
    """Attribute of the config that must be true for the tensor to be a copy."""


TIED_HEAD = Copy("lm_head.weight", of="model.embed_tokens.weight", when="tie_word_embeddings")


def short(value: Any) -> str:
    """A value in an error's one line."""
    text = "null" if value is None else repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
