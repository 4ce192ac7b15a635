"""Arguments of hybrid models, and of the checkpoint that a run starts from. No torch."""

from collections.abc import Iterator
from dataclasses import dataclass, field, fields

from mca_lib.errors import ConfigError
from mca_lib.models.config_parts import HybridLayers, Mamba2
from mca_lib.models.hybrid.pattern import parse_pattern
from mca_lib.models.hybrid.sizes import hybrid_layers

_ALONE_WITH = {"finetune": "load_checkpoint", "no_load_optim": "load_checkpoint"}
"""Field → the one without which it has no effect."""


@dataclass
class HybridArguments:
    """How a transformer becomes a hybrid when it is loaded, and which training it goes on from."""

    hybrid_layer_pattern: str | None = field(
        default=None,
        metadata={"help": "Layers of the hybrid that the transformer becomes, as M*-*-; | parts pipeline stages."},
    )
    mamba_num_heads: int | None = field(default=None, metadata={"help": "Heads of a Mamba layer; default: derived."})
    mamba_head_dim: int | None = field(default=None, metadata={"help": "Channels of a Mamba head; default: 64."})
    mamba_state_size: int | None = field(default=None, metadata={"help": "State of a Mamba channel; default: 128."})
    mamba_num_groups: int | None = field(
        default=None, metadata={"help": "Groups of Mamba heads that share B and C; default: 1."}
    )
    mamba_conv_kernel: int | None = field(default=None, metadata={"help": "Width of Mamba's convolution; default: 4."})
    mamba_chunk_size: int | None = field(default=None, metadata={"help": "Tokens of one Mamba chunk; default: 128."})
    fresh_layers: str = field(
        default="random",
        metadata={
            "help": "Initialization of layers that the transformer does not have; with zero_output the hybrid starts "
            "as exactly the transformer.",
            "choices": ["random", "zero_output"],
        },
    )
    fresh_seed: int = field(default=0, metadata={"help": "Seed of that initialization."})
    use_legacy_model: bool = field(
        default=False, metadata={"help": "Go on training the transformer as what it is, whatever the pattern."}
    )
    load_checkpoint: str | None = field(
        default=None,
        metadata={"help": "Training checkpoint to start from: checkpoint-N/, or a directory of Megatron-LM."},
    )
    finetune: bool = field(
        default=False, metadata={"help": "Take weights and optimizer of load_checkpoint, and start at step 0."}
    )
    no_load_optim: bool = field(default=False, metadata={"help": "Take the weights of load_checkpoint alone."})

    def check_hybrid(self) -> None:
        """Raise ConfigError for fields that contradict each other."""
        if self.fresh_layers not in ("random", "zero_output"):
            raise ConfigError(f"fresh_layers={self.fresh_layers!r}: use random or zero_output")
        if type(self.fresh_seed) is not int or not 0 <= self.fresh_seed < 2**31:
            raise ConfigError(f"fresh_seed={self.fresh_seed!r}: use a whole number from 0 to 2147483647")
        if self.hybrid_layer_pattern is not None:
            parse_pattern(self.hybrid_layer_pattern)
        for name in self._fresh_fields() if self.hybrid_layer_pattern is None else ():
            raise ConfigError(f"{name}={getattr(self, name)!r} has no effect without hybrid_layer_pattern: set it too")
        for name, other in _ALONE_WITH.items():
            if getattr(self, name) and not getattr(self, other):
                raise ConfigError(f"{name}={getattr(self, name)!r} has no effect without {other}: set it too")

    def hybrid_layers(self, hidden_size: int) -> HybridLayers | None:
        """What a transformer of so many channels becomes; None: it stays a transformer. Raises ConfigError."""
        if self.hybrid_layer_pattern is None or self.use_legacy_model:
            return None
        sizes = {spec.name: getattr(self, f"mamba_{spec.name}", None) for spec in fields(Mamba2)}
        return hybrid_layers(parse_pattern(self.hybrid_layer_pattern).layers, hidden_size, sizes)

    def check_unchanged(self, own: HybridLayers) -> None:
        """Raise ConfigError for a field that would make other layers of those that a hybrid has already."""
        for name in self._fresh_fields():
            has = getattr(own.mamba, name.removeprefix("mamba_"), None)
            if getattr(self, name) != has:
                found = "none of its layers is fresh" if has is None else f"its own is {has}"
                raise ConfigError(
                    f"{name}={getattr(self, name)!r} has no effect: the model is a hybrid already, and {found}; "
                    "leave it out"
                )

    def _fresh_fields(self) -> Iterator[str]:
        """Fields of layers to be made that are set."""
        for spec in fields(HybridArguments):
            if spec.name.startswith(("mamba_", "fresh_")) and getattr(self, spec.name) != spec.default:
                yield spec.name
