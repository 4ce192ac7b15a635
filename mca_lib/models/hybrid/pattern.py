"""Patterns of hybrid models, and how their layers correspond to those of a transformer. No torch: milliseconds.

    M*-*-M*-*-          a Mamba-2 layer before every second layer of a transformer of four
    M*-*-|M*-*-         the same over two pipeline stages; `|` says how a run is laid out, not what the model is

Megatron-Core reads the same text (`hybrid_layer_pattern`).
"""

from dataclasses import dataclass
from functools import cached_property

from mca_lib.errors import ConfigError

MAMBA, ATTENTION, MLP, MOE, LATENT = "M", "*", "-", "E", "+"
SYMBOLS = {
    MAMBA: "Mamba-2",
    ATTENTION: "attention",
    MLP: "dense MLP",
    MOE: "mixture of experts",
    "G": "gated delta net",
    "D": "sparse attention (DSA)",
    LATENT: "latent attention",
}
PIPE, MTP = "|", "/"
_TRANSLATABLE = (MAMBA, ATTENTION, MLP, MOE)
MAX_SYMBOLS = 10_000
"""More are a slip, which would fill the memory, or a screen with its error."""


@dataclass(frozen=True)
class Pattern:
    """A pattern, taken apart."""

    segments: tuple[str, ...]
    """Layers of each (virtual) pipeline stage; one segment where the text has no `|`."""

    @property
    def layers(self) -> str:
        """One symbol per layer of the model."""
        return "".join(self.segments)

    def positions(self, *symbols: str) -> tuple[int, ...]:
        """Layers of these kinds, counted from 0."""
        return tuple(i for i, symbol in enumerate(self.layers) if symbol in symbols)


def parse_pattern(text: str, field: str = "hybrid_layer_pattern") -> Pattern:
    """Take a pattern apart.

    Raises ConfigError, naming `field`, for an empty pattern, a symbol that is none, multi-token prediction (`/`), and
    empty pipeline segments, and more than `MAX_SYMBOLS` symbols.
    """
    if not isinstance(text, str) or not text.strip():
        raise ConfigError(
            f"{field} is missing: write one symbol per layer, as M*-*-; `mcaflow hybrid-pattern` prints one"
        )
    if len(text) > MAX_SYMBOLS:
        raise ConfigError(
            f"{field} has {len(text)} symbols, and at most {MAX_SYMBOLS} are accepted; write fewer layers"
        )
    shown = f"{field}={text!r}"
    if MTP in text:
        raise ConfigError(
            f"{shown}: multi-token prediction ({MTP}…) has no weights in a transformer's checkpoint and is not "
            f"supported; remove {text[text.index(MTP) :]!r}"
        )
    if odd := sorted(set(text) - set(SYMBOLS) - {PIPE}):
        known = ", ".join(f"{symbol} {words}" for symbol, words in SYMBOLS.items())
        raise ConfigError(f"{shown}: {odd[0]!r} is no layer; layers are {known}, and | parts pipeline stages")
    segments = tuple(text.split(PIPE))
    if not all(segments):
        raise ConfigError(f"{shown}: a pipeline stage between | has no layers")
    return Pattern(segments)


def model_pattern(text: str, field: str) -> str:
    """A pattern that says what a model is: as `parse_pattern`, and without pipeline stages."""
    pattern = parse_pattern(text, field)
    if len(pattern.segments) > 1:
        raise ConfigError(
            f"{field}={text!r}: pipeline stages (|) belong to a run, not to the model; write the pattern without | "
            "here, and with it in parallel.pipeline_layout"
        )
    return pattern.layers


@dataclass(frozen=True)
class LayerMap:
    """Where the parts of a transformer's layers are in a hybrid."""

    layers: str
    """The hybrid's pattern, without `|`."""

    @cached_property
    def attention(self) -> tuple[int, ...]:
        """Hybrid layer of the attention of each transformer layer."""
        return tuple(i for i, symbol in enumerate(self.layers) if symbol in (ATTENTION, LATENT))

    @cached_property
    def mlp(self) -> tuple[int, ...]:
        """Hybrid layer of the MLP, or of the experts, of each transformer layer."""
        return tuple(i for i, symbol in enumerate(self.layers) if symbol in (MLP, MOE))

    @cached_property
    def fresh(self) -> tuple[int, ...]:
        """Hybrid layers that no transformer layer corresponds to."""
        return tuple(i for i, symbol in enumerate(self.layers) if symbol == MAMBA)

    @property
    def num_transformer_layers(self) -> int:
        return len(self.attention)

    @cached_property
    def transformer_layer(self) -> dict[int, int]:
        """Transformer layer of each hybrid layer that has one."""
        return {hybrid: i for part in (self.attention, self.mlp) for i, hybrid in enumerate(part)}


def check_translatable(
    text: str, num_layers: int, *, has_experts: bool, field: str = "hybrid_layer_pattern"
) -> LayerMap:
    """How a hybrid of this pattern starts from a transformer of `num_layers` layers.

    Args:
        has_experts: the transformer's MLPs are mixtures of experts.

    Raises ConfigError with the reason and what to change, where it cannot.
    """
    layers = parse_pattern(text, field).layers
    shown = f"{field}={text!r}"
    if odd := [s for s in SYMBOLS if s in layers and s not in _TRANSLATABLE]:
        raise ConfigError(
            f"{shown}: {odd[0]} ({SYMBOLS[odd[0]]}) cannot start from a transformer, whose weights have another form; "
            f"use {', '.join(_TRANSLATABLE)}, or train the pattern from scratch"
        )
    found = LayerMap(layers)
    if MLP in layers and MOE in layers:
        raise ConfigError(
            f"{shown} mixes dense (-) and MoE (E) layers; a transformer has one kind in all layers, so use one of them"
        )
    if len(found.attention) != len(found.mlp) or not found.attention:
        raise ConfigError(
            f"{shown} has {len(found.attention)} attention (*) and {len(found.mlp)} MLP (- or E) layers; each of the "
            f"transformer's {num_layers} layers has one of both, so write {num_layers} of both"
        )
    kind, other = (MOE, MLP) if has_experts else (MLP, MOE)
    if other in layers:
        raise ConfigError(
            f"{shown} has {SYMBOLS[other]} layers ({other}), and the transformer's are {SYMBOLS[kind]}: "
            f"write {kind} for {other}"
        )
    if found.num_transformer_layers != num_layers:
        raise ConfigError(
            f"{shown} has {found.num_transformer_layers} attention and MLP layers, and the transformer has "
            f"{num_layers}; `mcaflow hybrid-pattern --layers {num_layers}` prints a pattern that fits"
        )
    if any(mlp < attention for attention, mlp in zip(found.attention, found.mlp, strict=True)):
        raise ConfigError(f"{shown}: an MLP comes before the attention of its layer; write every {kind} after its *")
    return found


def interpolated(layers: int, mamba_every: int, *, has_experts: bool = False) -> str:
    """Pattern of a transformer of `layers` layers with a Mamba-2 layer before every `mamba_every`-th of them.

    Raises ConfigError for sizes below 1, and for more layers than a pattern may have; `mamba_every` 0 adds none.
    """
    if layers < 1 or mamba_every < 0:
        raise ConfigError(f"layers={layers} must be at least 1, and mamba_every={mamba_every} at least 0")
    if layers > MAX_SYMBOLS // 3:
        raise ConfigError(f"layers={layers}: at most {MAX_SYMBOLS // 3} are accepted")
    block = ATTENTION + (MOE if has_experts else MLP)
    return "".join((MAMBA if mamba_every and i % mamba_every == 0 else "") + block for i in range(layers))
