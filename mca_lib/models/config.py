"""`McaModelConfig`: what a model *is*, and nothing about how it is run.

It is the `mca_config.json` of a checkpoint: architecture only, so the same file serves every parallel layout and
precision. The source's Hugging Face config travels inside it untouched, so an export loses no field. No torch here:
preflight reads it in milliseconds. `mca_lib.models.transformer_config` turns it into Megatron's `TransformerConfig`.
"""

import json
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, Literal, Self

from mca_lib.errors import CheckpointError, ConfigError, ModelError
from mca_lib.models.config_checks import (
    check_biased_experts,
    check_hybrid,
    check_latent_attention,
    check_linear_attention,
    check_norms,
    check_rotary,
    checked_layers,
)
from mca_lib.models.config_derived import Derived
from mca_lib.models.config_fields import at_default, from_json
from mca_lib.models.config_files import CONFIG_NAME, is_mca_checkpoint, read_hf_config, read_json
from mca_lib.models.config_json import parts_from_json
from mca_lib.models.config_parts import (
    ROPE_TYPES,
    Experts,
    GatedDeltaNet,
    HybridLayers,
    LatentAttention,
    LinearRope,
    Llama3Rope,
    LongRope,
    Mamba2,
    RopeScaling,
    YarnRope,
    check_sizes,
)
from mca_lib.models.hybrid.pattern import LayerMap
from mca_lib.models.vision.part import Vision

__all__ = [
    "CONFIG_NAME",
    "ROPE_TYPES",
    "Experts",
    "GatedDeltaNet",
    "HybridLayers",
    "LatentAttention",
    "LinearRope",
    "Llama3Rope",
    "LongRope",
    "Mamba2",
    "McaModelConfig",
    "RopeScaling",
    "Vision",
    "YarnRope",
    "is_mca_checkpoint",
    "read_hf_config",
    "read_json",
]

FORMAT_VERSION = 2

Dtype = Literal["float32", "bfloat16", "float16"]
Activation = Literal["swiglu", "geglu", "quick_geglu", "relu2"]
SOURCE_FIELDS = ("source_dtype", "source_dtype_exceptions", "source_copies", "source_prefixes", "hf_config")
"""Fields that say how the source was written, and not what the model is."""

_SIZES = (
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "num_query_groups",
    "kv_channels",
    "vocab_size",
    "max_position_embeddings",
)


@dataclass(frozen=True)
class McaModelConfig(Derived):
    """A decoder-only transformer (RMSNorm, rotary positions, causal attention, SwiGLU), or a hybrid with its layers."""

    model_type: str
    """Hugging Face model type; names the family that maps config and weights."""
    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    """Of a dense MLP."""
    num_attention_heads: int
    num_query_groups: int
    """Key/value heads."""
    kv_channels: int
    """Size of one head; need not be hidden_size / num_attention_heads."""
    vocab_size: int
    """Rows of the source's embedding. Padding for tensor parallelism is never part of it."""
    max_position_embeddings: int
    norm_epsilon: float = 1e-6
    zero_centered_norms: bool = False
    """Every RMSNorm multiplies by 1 + weight, so that a weight of 0 is neutral."""
    pre_norms: bool = True
    """Attention and MLP have a norm on their input."""
    post_norms: bool = False
    """They have one on their output, before it is added to the residual."""
    rotary: bool = True
    """Queries and keys rotate by their position; without, attention has none."""
    rotary_base: float = 10000.0
    rotary_channels: int | None = None
    """The first channels of a head, which rotate, where the others stay as they are; None: all rotate."""
    rope_scaling: RopeScaling | None = None
    sliding_rotary_base: float | None = None
    """The base in layers with the window, whose rope is not scaled; None: that of the other layers."""
    sliding_window: int | None = None
    """Tokens that a query sees, its own included; None: all before it."""
    full_attention_layers: tuple[int, ...] = ()
    """Layers without the window, counted from 0."""
    latent_attention: LatentAttention | None = None
    gated_delta_net: GatedDeltaNet | None = None
    """None: all layers have softmax attention."""
    moe: Experts | None = None
    hybrid: HybridLayers | None = None
    """None: a transformer. Else num_layers counts the layers of the pattern."""
    vision: Vision | None = None
    """None: a model of text alone."""
    mtp_num_layers: int = 0
    """Multi-token prediction layers after the last (https://arxiv.org/abs/2412.19437, 2.2)."""
    embedding_multiplier: float = 1.0
    """Of what is looked up for the first layer, rounded to the dtype of the weights; the output layer is without."""
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    attention_output_bias: bool = False
    attention_output_gate: bool = False
    """What attention puts out is multiplied by the sigmoid of a gate, which is projected beside the query."""
    mlp_bias: bool = False
    activation: Activation = "swiglu"
    """Of MLPs and experts: `geglu` has gelu's tanh form in its gate, `quick_geglu` x·sigmoid(1.702·x); `relu2` is
    relu(x)², without a gate."""
    activation_clamp: float | None = None
    """What goes into a gate is no more than this, and what a gate multiplies is within it at both signs."""
    glu_linear_offset: float = 0.0
    """Is added to what a gate multiplies."""
    attention_sinks: bool = False
    """Each head's softmax has one more score, which is learned and belongs to no token."""
    qk_layernorm: bool = False
    """Queries and keys have a norm over each head."""
    qk_norm_over_heads: bool = False
    """They have one over all heads of a token at once."""
    query_pre_attn_scalar: int | None = None
    """Scores are divided by its square root; None: the head size."""
    attention_dropout: float = 0.0
    residual_dropout: float = 0.0
    """Of what attention and MLP add to the residual."""
    initializer_range: float = 0.02
    source_dtype: Dtype = "float32"
    """Dtype of most of the source's weights: what an export writes by default."""
    source_dtype_exceptions: dict[str, Dtype] = field(default_factory=dict)
    """Hugging Face name → dtype, for the source's tensors that differ from `source_dtype`."""
    source_copies: tuple[str, ...] = ()
    """Hugging Face names under which the source stores a tensor a second time; an export writes them again."""
    source_prefixes: dict[str, str] = field(default_factory=dict)
    """Prefix of the weight table's Hugging Face names → the source's, where it has another spelling."""
    hf_config: dict[str, Any] = field(default_factory=dict)
    """The source's config.json, whole."""

    def __post_init__(self) -> None:
        check_sizes(self, *_SIZES)
        for name in ("full_attention_layers", "source_copies"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        if self.hybrid is not None:
            check_hybrid(self, self.hybrid)
        if self.num_attention_heads % self.num_query_groups:
            raise ModelError(
                f"model config: {self.num_attention_heads} attention heads do not divide into "
                f"{self.num_query_groups} key/value heads"
            )
        check_norms(self)
        check_biased_experts(self)
        check_linear_attention(self)
        if self.latent_attention is not None:
            check_latent_attention(self)
        else:
            check_rotary(self)

    # From a transformer to a hybrid and back.

    def with_hybrid(self, hybrid: HybridLayers, field: str = "hybrid_layer_pattern") -> Self:
        """The hybrid that starts from this transformer. Raises ConfigError, naming `field`, where it cannot."""
        from mca_lib.models.registry import check_hybrid_export

        layers = checked_layers(self, hybrid, field)
        config = replace(
            self,
            hybrid=hybrid,
            num_layers=len(layers.layers),
            moe=self.moe and replace(self.moe, layers=layers.mlp),
            full_attention_layers=tuple(layers.attention[i] for i in self.full_attention_layers),
        )
        check_hybrid_export(config, field)
        return config

    @property
    def layer_map(self) -> LayerMap:
        """Where a hybrid has the parts of the transformer that it could have started from."""
        return LayerMap(self.hybrid.pattern)

    @property
    def transformer(self) -> Self:
        """The transformer that `with_hybrid` made this hybrid of; a transformer is its own.

        Of a pattern that no transformer becomes, one with as many layers as the hybrid has attention or MLP layers.
        """
        if self.hybrid is None:
            return self
        layers = self.layer_map
        num_layers = max(len(layers.attention), len(layers.mlp), 1)
        return replace(
            self,
            hybrid=None,
            num_layers=num_layers,
            moe=self.moe and replace(self.moe, layers=tuple(range(num_layers))),
            full_attention_layers=tuple(layers.transformer_layer[i] for i in self.full_attention_layers),
        )

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready, every field."""
        values = {"format_version": FORMAT_VERSION, **asdict(self)}
        if self.rope_scaling is not None:
            kind = next(name for name, cls in ROPE_TYPES.items() if type(self.rope_scaling) is cls)
            values["rope_scaling"] = {"rope_type": kind, **values["rope_scaling"]}
        return json.loads(json.dumps(values))  # tuples are lists, as in the file

    def meaning(self) -> dict[str, Any]:
        """`to_dict` without the fields that have their default, parts likewise: what a digest is made of.

        A model keeps its digest when a later version has further fields, which are neutral by default.
        """
        return _without_defaults(self, self.to_dict())

    @classmethod
    def from_dict(cls, values: dict[str, Any], where: str = CONFIG_NAME) -> Self:
        """Inverse of `to_dict`.

        Raises ConfigError naming the key that is unknown (and the nearest known one), missing, of another kind, or of
        a value that the model type cannot have.
        """
        from mca_lib.models.registry import check_config

        values = dict(values)
        version = values.pop("format_version", None)
        if version != FORMAT_VERSION:
            raise ConfigError(f"{where}: format_version {version!r} is not {FORMAT_VERSION}; convert the model again")
        try:
            values |= parts_from_json(values, where)
            config = from_json(cls, values, where)
            check_config(config)
        except ModelError as e:
            raise ConfigError(f"{where}: {e}") from e
        return config

    def save_pretrained(self, directory: str | Path) -> None:
        """Write `mca_config.json` into `directory`."""
        text = json.dumps(self.to_dict(), indent=2, sort_keys=True, ensure_ascii=False)
        Path(directory, CONFIG_NAME).write_text(text + "\n", encoding="utf-8")

    @classmethod
    def from_pretrained(cls, directory: str | Path) -> Self:
        """Read the config of an MCA checkpoint directory, or derive it from a Hugging Face one.

        Raises:
            ModelError: the directory is neither, or its model is not supported.
            ConfigError: `mca_config.json` is not valid.
        """
        directory = Path(directory)
        if (path := directory / CONFIG_NAME).is_file():
            return cls.from_dict(read_json(path, CheckpointError), where=str(path))
        from mca_lib.models.registry import config_from_hf

        return config_from_hf(read_hf_config(directory))


def _without_defaults(value: Any, plain: dict[str, Any]) -> dict[str, Any]:
    """`plain`, the JSON of a dataclass, without the fields of it and of its parts that have their default."""
    kept = dict(plain)
    for f in fields(value):
        part = getattr(value, f.name)
        if at_default(value, f):
            del kept[f.name]
        elif is_dataclass(part):
            kept[f.name] = _without_defaults(part, plain[f.name])
    return kept
