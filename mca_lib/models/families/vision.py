"""What the vision-language families have in common: a text family's tables within a config with two parts.

                flat (transformers 4)                        nested (transformers 5)
    config      text fields beside vision_config             text_config and vision_config
    weights     model.layers.0 …   visual.blocks.0 …         model.language_model.layers.0 …   model.visual.blocks.0 …

Both spellings of each are read, in any combination, and an export has the source's. Weight tables, adapters and
`freeze` speak the names of transformers 5, which are those of its modules. The tower's config is carried as it is.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from mca_lib.converter.mapping import Mapping
from mca_lib.errors import ModelError
from mca_lib.models.config import McaModelConfig
from mca_lib.models.families.base import Copy, Family, HfConfig
from mca_lib.models.vision.part import Vision
from mca_lib.models.vision.towers import TOWERS

FLAT_NAMES = {"model.language_model.": "model.", "model.visual.": "visual."}
"""Prefix of a name in transformers 5 → in transformers 4."""
TIED_HEAD = Copy("lm_head.weight", of="model.language_model.embed_tokens.weight", when="tie_word_embeddings")

_TOKENS = {
    "image_token_id": 151655,
    "video_token_id": 151656,
    "vision_start_token_id": 151652,
    "vision_end_token_id": 151653,
}
_OWN = ("text_config", "vision_config", "vision_token_id", *_TOKENS)
"""Fields of the whole, which the language model does not have."""
_SHARED = (
    "model_type",
    "architectures",
    "tie_word_embeddings",
    "auto_map",
    "is_encoder_decoder",
    "quantization_config",
)
"""Fields that the view of the language model takes from the whole."""
_MROPE = ("mrope_section", "mrope_interleaved")
_ROPES = ("rope_scaling", "rope_parameters")


def under_language_model(rows: Iterable[Mapping]) -> tuple[Mapping, ...]:
    """A text family's weight table with the names that the weights have in a vision-language model."""
    renamed = ((row, tuple(_under(name) for name in row.hf)) for row in rows)
    return tuple(replace(row, hf=names) for row, names in renamed)


def _under(name: str) -> str:
    return name.replace("model.", "model.language_model.", 1) if name.startswith("model.") else name


@dataclass(frozen=True)
class VisionFamily(Family):
    """A vision-language model type; `fields` and `weights` are those of its text family."""

    mrope_section: tuple[int, ...] = ()
    """transformers' default."""
    mrope_interleaved: bool = False
    may_be_flat: bool = True
    """transformers reads the text fields beside `vision_config` too."""
    spellings: tuple[dict[str, str], ...] = (FLAT_NAMES,)
    copies: tuple[Copy, ...] = (TIED_HEAD,)

    def config_from_hf(self, hf: HfConfig) -> McaModelConfig:
        """As `Family.config_from_hf`, of a config with a part for each of the two."""
        config = super().config_from_hf(self._text_view(hf))
        vision = self._vision(hf)
        vision.axes(config.kv_channels // 2)
        output = TOWERS[self.model_type].read(vision.tower).output
        if output != config.hidden_size:
            raise ModelError(
                f"config.json: the vision tower gives features of {output} channels, and the language model's "
                f"hidden_size is {config.hidden_size}"
            )
        if vision.deepstack_layers > config.num_layers:
            raise ModelError(
                f"config.json: vision_config.deepstack_visual_indexes has {vision.deepstack_layers} entries, and the "
                f"language model {config.num_layers} layers"
            )
        return replace(config, vision=vision, hf_config=dict(hf))

    def mappings(self, config: McaModelConfig) -> list[Mapping]:
        """The text family's rows, and a row for every tensor of the tower."""
        tower = TOWERS[self.model_type].rows(config.vision.tower)
        return [*super().mappings(config), *(self.respelled(row, config) for row in tower)]

    def _spelled(self, config: McaModelConfig, transformers: int | None) -> HfConfig:
        hf = dict(config.hf_config)
        hf.setdefault("model_type", self.model_type)
        if config.vision is None:
            raise ModelError(f"model config: vision is missing, which model type {self.model_type!r} has")
        if not hf.get("text_config") and ("hidden_size" not in hf or not self.may_be_flat):
            hf["text_config"] = {"model_type": f"{self.model_type}_text"}
        before = self._text_view(hf)
        after = super()._spelled(replace(config, hf_config=before), transformers)
        hf |= {name: after.pop(name) for name in ("model_type", "architectures")}
        after = self._with_mrope(hf.get("text_config") or hf, before, after, config.vision)
        if hf.get("text_config"):
            if config.tie_word_embeddings or "tie_word_embeddings" in hf:
                hf["tie_word_embeddings"] = config.tie_word_embeddings
            kept = {n: v for n, v in hf["text_config"].items() if n in _SHARED}
            hf["text_config"] = {n: v for n, v in after.items() if n not in _SHARED} | kept
            if "tie_word_embeddings" in kept:
                hf["text_config"]["tie_word_embeddings"] = config.tie_word_embeddings
        else:
            hf = {n: hf[n] for n in (*_OWN, "model_type", "architectures") if n in hf} | after
        hf["vision_config"] = config.vision.tower
        for name in ("image_token_id", "video_token_id"):
            if name in hf or getattr(config.vision, name) != _TOKENS[name]:
                hf[name] = getattr(config.vision, name)
        return hf

    def _text_view(self, hf: HfConfig) -> HfConfig:
        """The language model's fields as a flat config whose rope is of one axis."""
        nested = hf.get("text_config")
        if nested is None and not self.may_be_flat:
            raise ModelError("config.json: text_config is missing")
        if nested is None:
            view = {name: value for name, value in hf.items() if name not in _OWN}
        elif not isinstance(nested, dict):
            raise ModelError(f"config.json: text_config={nested!r:.80} must be an object")
        else:
            shared = {name: hf[name] for name in _SHARED if name in hf}
            tied = bool(hf.get("tie_word_embeddings")) or bool(nested.get("tie_word_embeddings"))
            view = {name: value for name, value in nested.items() if name not in _SHARED}
            view |= {**shared, "tie_word_embeddings": tied}
        for where in _ROPES:
            if isinstance(view.get(where), dict):
                view[where] = _one_axis(view[where])
        return view

    def _vision(self, hf: HfConfig) -> Vision:
        tower = hf.get("vision_config")
        if not isinstance(tower, dict):
            raise ModelError(f"config.json: vision_config={tower!r:.80} must be an object")
        text = hf.get("text_config") or hf
        rope = next((text[where] for where in _ROPES if text.get(where)), {})
        section = rope.get("mrope_section", self.mrope_section)
        if rope.get("mrope_interleaved", self.mrope_interleaved) != self.mrope_interleaved:
            raise ModelError(
                f"config.json: mrope_interleaved={rope['mrope_interleaved']} is not what transformers computes for "
                f"model type {self.model_type!r}"
            )
        tokens = {name: hf.get(name, _TOKENS[name]) for name in ("image_token_id", "video_token_id")}
        for name, value in tokens.items():
            if type(value) is not int:
                raise ModelError(f"config.json: {name}={value!r:.80} must be an integer")
        deepstack = TOWERS[self.model_type].read(tower).deepstack
        return Vision(tower, **tokens, mrope_section=section, mrope_interleaved=self.mrope_interleaved,
                      deepstack_layers=deepstack)  # fmt: skip

    def _with_mrope(self, source: HfConfig, before: HfConfig, after: HfConfig, vision: Vision) -> HfConfig:
        """The rope as the source has it where that says the same, else the new one with its sections."""
        same = all(before.get(name) == after.get(name) for name in (*_ROPES, "rope_theta"))
        if same and self._says_sections(source, vision):
            return after | {name: source[name] for name in _ROPES if name in source}
        where = "rope_scaling" if "rope_scaling" in after and "rope_parameters" not in after else "rope_parameters"
        rope = dict(after.get(where) or {"rope_type": "default"})
        if where == "rope_parameters":
            base = after.pop("rope_theta", None)
            rope |= {"rope_theta": base} if base is not None else {}
        given = next((source[name] for name in _ROPES if source.get(name)), {})
        kept = {name: given[name] for name in _MROPE if name in given}
        return after | {where: rope | {"mrope_section": list(vision.mrope_section)} | kept}

    def _says_sections(self, source: HfConfig, vision: Vision) -> bool:
        rope = next((source[name] for name in _ROPES if source.get(name)), {})
        return tuple(rope.get("mrope_section", self.mrope_section)) == vision.mrope_section


def _one_axis(rope: dict[str, Any]) -> dict[str, Any]:
    """A rope without its sections: transformers takes the old kind `mrope` for the default one."""
    kept = {name: value for name, value in rope.items() if name not in _MROPE}
    return {n: "default" if n in ("type", "rope_type") and v == "mrope" else v for n, v in kept.items()}
