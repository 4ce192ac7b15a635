"""What a model family is: two tables, config and weights, each read in both directions.

A family file holds data only. Adding a family is adding one file beside `llama.py` and one line to `registry.py`.
No torch here.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass, field, fields, replace
from operator import attrgetter
from typing import Any

from mca_lib.converter.mapping import Mapping
from mca_lib.errors import ModelError
from mca_lib.models.config import (
    SOURCE_FIELDS,
    Experts,
    GatedDeltaNet,
    HybridLayers,
    LatentAttention,
    Mamba2,
    McaModelConfig,
    RopeScaling,
)
from mca_lib.models.families.field_types import check_types
from mca_lib.models.families.layers import PatternRule
from mca_lib.models.families.partial_rotary import Share, channels_from_hf, channels_to_hf
from mca_lib.models.families.quantization import block_size
from mca_lib.models.families.rope import DEFAULT_BASE, Rope, RopeNames, rope_from_hf, rope_to_hf
from mca_lib.models.families.rows import REQUIRED, TIED_HEAD, Copy, Field, HfConfig, Neutral, short
from mca_lib.models.families.two_ropes import ropes_from_hf, ropes_to_hf
from mca_lib.models.families.window import NO_WINDOW, WindowRule
from mca_lib.models.hybrid.pattern import MOE, model_pattern
from mca_lib.models.hybrid.weights import hybrid_rows


@dataclass(frozen=True)
class Family:
    """One Hugging Face model type."""

    model_type: str
    architecture: str
    """Class name in `architectures`; the head that the weight table describes."""
    fields: tuple[Field, ...]
    weights: tuple[Mapping, ...]
    neutral: tuple[Neutral, ...]
    fixed: dict[str, Any] = field(default_factory=dict)
    """Fields of `McaModelConfig` that the family always has, whatever the config says."""
    derived: dict[str, Callable[[HfConfig], Any]] = field(default_factory=dict)
    """Fields of `McaModelConfig` that follow from several of the Hugging Face config, which an export leaves as is."""
    rope_base: float = DEFAULT_BASE
    """transformers' base where the config gives none."""
    default_rope: RopeScaling | None = None
    """transformers' scaling where the config gives neither `rope_scaling` nor `rope_parameters`."""
    rope_names: RopeNames = field(default_factory=RopeNames)
    sliding_rope_base: float | None = None
    """The same of layers with a window; None: they have the rope of the others."""
    rotary_share: Share | None = None
    """transformers' `partial_rotary_factor` where the config gives none; None: all channels of a head rotate."""
    window: WindowRule = NO_WINDOW
    copies: tuple[Copy, ...] = (TIED_HEAD,)
    ignored_weights: tuple[str, ...] = (r".*\.rotary_emb\.inv_freq",)
    """Tensors (regular expressions) that old checkpoints carry and that hold nothing learned."""
    spellings: tuple[dict[str, str], ...] = ()
    """Other names that sources give the weights: prefix of a name in the table → prefix there."""
    stacked_experts: bool = False
    """Sources may store the experts of a layer as two tensors; see `mca_lib.converter.stacked_experts`."""
    pattern: PatternRule | None = None
    """Of a Hugging Face model that is a hybrid itself; the tables have its kinds of layers, counted as there."""

    @property
    def hybrid(self) -> bool:
        """The Hugging Face models are hybrids themselves."""
        return self.pattern is not None

    def config_from_hf(self, hf: HfConfig) -> McaModelConfig:
        """Config table, left to right. Raises ModelError naming the field that cannot be carried over."""
        check_types(hf)
        architectures = hf.get("architectures")
        if architectures and self.architecture not in architectures:
            raise ModelError(f"config.json: architectures={architectures} is not supported; use {self.architecture}")
        block_size(hf)  # refuses quantized weights that cannot be read
        for rule in self.neutral:
            rule.check(hf)
        values = {**self.fixed, **{name: f.read(hf) for f in self._fields_of(hf) for name in f.targets}}
        values |= {name: derive(hf) for name, derive in self.derived.items()}
        if self.pattern is not None:
            values |= self._hybrid_values(hf, values)
        (rotary_base, rope_scaling), sliding_rotary_base = self._ropes(hf)
        rotary_channels = channels_from_hf(hf, values["kv_channels"], self.rotary_share)
        sliding_window, full_attention_layers = self.window.read(hf)
        try:
            return McaModelConfig(
                model_type=self.model_type,
                rotary_base=rotary_base,
                sliding_rotary_base=sliding_rotary_base,
                rotary_channels=rotary_channels,
                rope_scaling=rope_scaling,
                sliding_window=sliding_window,
                full_attention_layers=full_attention_layers,
                hf_config=dict(hf),
                latent_attention=_part(LatentAttention, values, "latent_attention"),
                gated_delta_net=_part(GatedDeltaNet, values, "gated_delta_net"),
                moe=_part(Experts, values, "moe"),
                hybrid=_part(HybridLayers, values, "hybrid"),
                **values,
            )
        except TypeError as e:
            raise ModelError(f"config.json: {e}") from e

    def config_to_hf(self, config: McaModelConfig, transformers: int | None = None) -> HfConfig:
        """Config table, right to left: the source's config with the mapped fields as they are now.

        Args:
            transformers: the release, 4 or 5, whose spelling of the rope is written; None keeps the source's.

        Raises:
            ModelError: a field has a value for which the family has no words, so that the written config would be that
                of another model.
        """
        hf = self._spelled(config, transformers)
        meant, said = _flat(config), _flat(self.config_from_hf(hf))
        for name in {**meant, **said}:
            if name not in meant or name not in said or meant[name] != said[name]:
                raise ModelError(
                    f"model config: {name}={short(meant.get(name))} is not possible for model type "
                    f"{self.model_type!r}, whose config.json would say {short(said.get(name))}"
                )
        return hf

    def check(self, config: McaModelConfig) -> None:
        """Raises ModelError naming the field whose value the family cannot have."""
        self.config_to_hf(config)
        if foreign := sorted(set(config.source_copies) - set(self.copies_of(config))):
            raise ModelError(f"model config: source_copies: {foreign[0]!r} is not a tensor that a source has twice")

    def _spelled(self, config: McaModelConfig, transformers: int | None) -> HfConfig:
        hf = dict(config.hf_config)
        if (given := hf.get("model_type", self.model_type)) != self.model_type:
            raise ModelError(
                f"model config: model_type={self.model_type!r} and hf_config.model_type={given!r:.80} differ"
            )
        hf.setdefault("model_type", self.model_type)
        if not hf.get("architectures"):
            hf["architectures"] = [self.architecture]
        if self.pattern is not None:
            hf = self.pattern.write(hf, config.hybrid.pattern)
        for f in self._fields_of(hf):
            part, _, dotted = f.targets[0].partition(".")
            if dotted and getattr(config, part) is None:
                raise ModelError(f"model config: {part} is missing, which model type {self.model_type!r} has")
            value, name = attrgetter(f.targets[0])(config), f.spelling(hf)
            if name in hf and hf[name] is None and f.read(hf) == value:
                continue  # null in the source, and null still means the same
            if name in hf or f.default is REQUIRED or f.read(hf) != value:
                hf[name] = value
        hf = self.window.write(hf, (config.sliding_window, config.full_attention_layers))
        rope, partial = (config.rotary_base, config.rope_scaling), self.rotary_share is not None
        if self._has_default_rope(hf) and self._ropes(hf)[0] == rope:
            return hf
        if self.sliding_rope_base is not None:
            ropes = rope, config.sliding_rotary_base
            return ropes_to_hf(hf, ropes, transformers, self.rope_base, self.sliding_rope_base)
        hf = rope_to_hf(hf, rope, transformers, self.rope_base, partial=partial, names=self.rope_names)
        return channels_to_hf(hf, config.rotary_channels, config.kv_channels, self.rotary_share, transformers)

    def _has_default_rope(self, hf: HfConfig) -> bool:
        said = hf.get("rope_scaling") or hf.get("rope_parameters") is not None
        return self.default_rope is not None and not said

    def _ropes(self, hf: HfConfig) -> tuple[Rope, float | None]:
        """(rope, base in layers with a window where they have one of their own)."""
        if self._has_default_rope(hf):
            base = hf.get("rope_theta")
            return (self.rope_base if base is None else float(base), self.default_rope), None
        if self.sliding_rope_base is not None:
            return ropes_from_hf(hf, self.rope_base, self.sliding_rope_base)
        partial = self.rotary_share is not None
        return rope_from_hf(hf, self.rope_base, partial=partial, names=self.rope_names), None

    def _fields_of(self, hf: HfConfig) -> list[Field]:
        """Rows of the config table that a Hugging Face config has."""
        symbols = "" if self.pattern is None else self.pattern.read(hf)
        return [f for f in self.fields if f.layers is None or f.layers in symbols]

    def _hybrid_values(self, hf: HfConfig, values: dict[str, Any]) -> dict[str, Any]:
        """What follows from the pattern, and the sizes of Mamba layers in a part; `values` loses what no layer has."""
        pattern = model_pattern(self.pattern.read(hf), "config.json: the pattern of the layers")
        for name in [name for name in values if name.startswith("moe.") and MOE not in pattern]:
            del values[name]
        found = {"num_layers": len(pattern), "hybrid.pattern": pattern}
        found["hybrid.mamba"] = _part(Mamba2, values, "hybrid.mamba")
        if MOE in pattern:
            found["moe.layers"] = tuple(i for i, symbol in enumerate(pattern) if symbol == MOE)
        return found

    def mappings(self, config: McaModelConfig) -> list[Mapping]:
        """Rows of the weight table that this config has."""
        rows = self.weights if config.hybrid is None or self.hybrid else hybrid_rows(self.weights)
        rows = [row for row in rows if row.layers is None or attrgetter(row.layers)(config)]
        rows = [row for row in rows if row.when is None or attrgetter(row.when)(config)]
        return [self.respelled(row, config) for row in rows]

    def respelled(self, row: Mapping, config: McaModelConfig) -> Mapping:
        """A row with the names of the config's source."""
        if not config.source_prefixes:
            return row
        return replace(row, hf=tuple(respelled(name, config.source_prefixes) for name in row.hf))

    def prefixes_in(self, names: Collection[str]) -> dict[str, str]:
        """The spelling, of those that the family knows, in which a source has these names."""
        if any(name.startswith(prefix) for spelling in self.spellings for prefix in spelling for name in names):
            return {}
        found = (s for s in self.spellings if any(n.startswith(own) for own in s.values() for n in names))
        return next(found, {})

    def copies_of(self, config: McaModelConfig) -> dict[str, str]:
        """Name of every tensor that a source of this config may store a second time → the tensor that it must equal."""
        pairs: dict[str, str] = {}
        for copy in self.copies:
            if copy.when is not None and not attrgetter(copy.when)(config):
                continue
            layers = range(config.num_layers, config.num_layers + config.mtp_num_layers)
            for name in [copy.hf.format(layer=i) for i in layers] if "{layer}" in copy.hf else [copy.hf]:
                pairs[name] = pairs.get(copy.of, copy.of)
        return {respelled(n, config.source_prefixes): respelled(of, config.source_prefixes) for n, of in pairs.items()}


def respelled(name: str, prefixes: dict[str, str]) -> str:
    """A Hugging Face name with its prefix as in `McaModelConfig.source_prefixes`."""
    for prefix, own in prefixes.items():
        if name.startswith(prefix):
            return own + name.removeprefix(prefix)
    return name


def _part(cls: type, values: dict[str, Any], name: str) -> Any:
    """The part that dotted targets describe, taken out of `values`; None when there is no such target."""
    dotted = [target for target in values if target.startswith(f"{name}.")]
    own = {target.removeprefix(f"{name}."): values.pop(target) for target in dotted}
    return cls(**own) if own else None


def _flat(config: McaModelConfig) -> dict[str, Any]:
    """Field → value of all that the model is; a part's fields dotted, as in the config table."""
    flat: dict[str, Any] = {}
    for f in fields(config):
        value = getattr(config, f.name)
        if isinstance(value, LatentAttention | GatedDeltaNet | Experts | HybridLayers):
            flat |= {f"{f.name}.{part.name}": getattr(value, part.name) for part in fields(value)}
        elif f.name not in SOURCE_FIELDS:
            flat[f.name] = value
    return flat
