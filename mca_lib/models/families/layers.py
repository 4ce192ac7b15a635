"""The layers of models that are hybrids themselves, as Hugging Face configs spell them, read and written. No torch."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any

from mca_lib.errors import ModelError

HfConfig = dict[str, Any]


class PatternRule(ABC):
    """How a family says which layers a model has."""

    @property
    @abstractmethod
    def fields(self) -> tuple[str, ...]:
        """Every field that may say it."""

    @abstractmethod
    def read(self, hf: HfConfig) -> str:
        """One symbol per layer. Raises ModelError naming the field that cannot be read."""

    @abstractmethod
    def spell(self, pattern: str) -> HfConfig:
        """Fields that say this pattern."""

    def write(self, hf: HfConfig, pattern: str) -> HfConfig:
        """`hf` with this pattern; untouched where it says so already."""
        try:
            if self.read(hf) == pattern:
                return hf
        except ModelError:
            pass  # says nothing, or what cannot be read
        return {name: value for name, value in hf.items() if name not in self.fields} | self.spell(pattern)


@dataclass(frozen=True)
class PatternText(PatternRule):
    """The pattern itself, in a field."""

    name: str

    @property
    def fields(self) -> tuple[str, ...]:
        return (self.name,)

    def read(self, hf: HfConfig) -> str:
        pattern = hf.get(self.name)
        if not isinstance(pattern, str):
            raise ModelError(f"config.json: {self.name}={pattern!r:.80} must be a text")
        return pattern

    def spell(self, pattern: str) -> HfConfig:
        return {self.name: pattern, "num_hidden_layers": len(pattern)}


@dataclass(frozen=True)
class LayerNames(PatternRule):
    """A list with a name for each layer, or in older files the pattern."""

    names: tuple[str, ...]
    """Fields of the list; the first is written."""
    text: str
    """Field of the pattern."""
    symbols: dict[str, str] = field(hash=False)
    """Name of a layer → its symbol; of several names the first is written."""

    @property
    def fields(self) -> tuple[str, ...]:
        return (*self.names, self.text)

    def read(self, hf: HfConfig) -> str:
        given = {name: self._of_list(name, hf[name]) for name in self.names if hf.get(name) is not None}
        if hf.get(self.text) is not None:
            given[self.text] = str(hf[self.text])
        if not given:
            raise ModelError(f"config.json: {self.names[0]} is missing")
        (name, found), *others = given.items()
        if conflict := [other for other, value in others if value != found]:
            raise ModelError(f"config.json: {name} and {conflict[0]} differ; keep one")
        if hf.get("num_hidden_layers") not in (None, len(found)):
            raise ModelError(f"config.json: num_hidden_layers={hf['num_hidden_layers']}, and {name} has {len(found)}")
        return found

    def spell(self, pattern: str) -> HfConfig:
        spelled = {symbol: name for name, symbol in reversed(self.symbols.items())}
        return {self.names[0]: [spelled[symbol] for symbol in pattern], "num_hidden_layers": len(pattern)}

    def _of_list(self, name: str, kinds: Any) -> str:
        if not isinstance(kinds, list):
            raise ModelError(f"config.json: {name}={kinds!r:.80} must be a list of names of layers")
        if odd := [kind for kind in kinds if kind not in self.symbols]:
            raise ModelError(f"config.json: {name}: {odd[0]!r:.80} is none of {', '.join(self.symbols)}")
        return "".join(self.symbols[kind] for kind in kinds)
