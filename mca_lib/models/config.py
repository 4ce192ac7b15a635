"""`McaModelConfig`: what a model *is*, and nothing about how it is run.

It is the `mca_config.json` of a checkpoint: architecture only, so the same file serves every parallel layout and
precision. The source's Hugging Face config travels inside it untouched, so an export loses no field. No torch here:
preflight reads it in milliseconds. `mca_lib.models.transformer_config` turns it into Megatron's `TransformerConfig`.
"""

import difflib
import json
from dataclasses import MISSING, asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, Self

from mca_lib.errors import CheckpointError, ConfigError, ModelError

CONFIG_NAME = "mca_config.json"
FORMAT_VERSION = 2

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
class LinearRope:
    """Positions divided by `factor`."""

    factor: float


@dataclass(frozen=True)
class Llama3Rope:
    """Llama 3's frequency-dependent rope scaling; every factor is the source's own, none has a default."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True)
class YarnRope:
    """YaRN (https://arxiv.org/abs/2309.00071): low frequencies interpolated, high ones kept, logits sharpened."""

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    """Factor of cos and sin; None follows from `factor` and the two below."""
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    """Round the bounds of the blended range to whole channels."""


RopeScaling = LinearRope | Llama3Rope | YarnRope
ROPE_TYPES: dict[str, type[RopeScaling]] = {"linear": LinearRope, "llama3": Llama3Rope, "yarn": YarnRope}
"""Hugging Face's `rope_type` → class."""


@dataclass(frozen=True)
class LatentAttention:
    """Multi-head latent attention (https://arxiv.org/abs/2405.04434): queries and keys/values from low-rank latents."""

    kv_lora_rank: int
    qk_nope_head_dim: int
    """Channels of a query or key head without position."""
    qk_rope_head_dim: int
    """Channels that rotate; those of the key are shared by all heads."""
    v_head_dim: int
    q_lora_rank: int | None = None
    """None: queries are projected directly."""
    norm_epsilon: float = 1e-6
    """Of the norms of the latents, whatever that of the layers is."""

    def __post_init__(self) -> None:
        _check_sizes(self, "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        if self.qk_rope_head_dim % 2:
            raise ModelError(f"model config: qk_rope_head_dim={self.qk_rope_head_dim} is odd; channels rotate in pairs")
        if self.v_head_dim > self.qk_head_dim:  # Megatron pads values to the size of keys in packed rows
            raise ModelError(
                f"model config: v_head_dim={self.v_head_dim} is larger than qk_nope_head_dim + qk_rope_head_dim = "
                f"{self.qk_head_dim}, which is not supported"
            )

    @property
    def qk_head_dim(self) -> int:
        """Channels of a query or key head."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def kv_down_size(self) -> int:
        """Rows of the projection to the latent of keys and values, and to the channels of the key that rotate."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def has_q_lora(self) -> bool:
        return self.q_lora_rank is not None

    @property
    def direct_q(self) -> bool:
        return self.q_lora_rank is None


@dataclass(frozen=True)
class Experts:
    """A mixture of experts in place of the MLP of some layers."""

    num_experts: int
    topk: int
    """Experts that a token goes to."""
    ffn_hidden_size: int
    """Of one expert."""
    layers: tuple[int, ...]
    """Layers that have experts, counted from 0; the others have a dense MLP."""
    score_function: Literal["softmax", "sigmoid"] = "softmax"
    normalize_topk: bool = True
    """The weights of the chosen experts sum to 1 (before `scaling_factor`)."""
    scaling_factor: float = 1.0
    num_groups: int | None = None
    """Experts form groups, of which `group_topk` are eligible for a token."""
    group_topk: int | None = None
    expert_bias: bool = False
    """A bias per expert that takes part in the choice alone (https://arxiv.org/abs/2408.15664)."""
    shared_ffn_hidden_size: int | None = None
    """Of the expert that every token goes to; None: there is none."""
    shared_gate: bool = False
    """The shared expert's output is scaled by a sigmoid gate."""
    aux_loss_coeff: float = 0.0
    """Weight of the load balancing loss in training."""

    def __post_init__(self) -> None:
        _check_sizes(self, "num_experts", "topk", "ffn_hidden_size")
        object.__setattr__(self, "layers", tuple(self.layers))
        if self.topk > self.num_experts:
            raise ModelError(f"model config: {self.topk} experts per token of {self.num_experts} experts")
        if self.topk == 1 and self.normalize_topk:
            raise ModelError("model config: with one expert per token its normalized weight is always 1; not supported")
        if not self.layers:
            raise ModelError("model config: no layer has experts; use a dense model type")
        if self.scaling_factor <= 0:  # Megatron takes 0 for none
            raise ModelError(f"model config: scaling_factor={self.scaling_factor} must be greater than 0")
        if self.num_groups is not None:
            self._check_groups(self.num_groups, self.group_topk)

    def _check_groups(self, groups: int, eligible: int | None) -> None:
        """Groups are rated by the sum of their two best experts (https://arxiv.org/abs/2412.19437, 2.1.2)."""
        _check_sizes(self, "num_groups", "group_topk")
        size = self.num_experts // groups
        if self.num_experts % groups or size < 2:
            raise ModelError(
                f"model config: {self.num_experts} experts do not divide into num_groups={groups} (n_group) groups of "
                "2 or more"
            )
        if eligible > groups or self.topk > eligible * size:
            raise ModelError(
                f"model config: {self.topk} experts per token from group_topk={eligible} (topk_group) of {groups} "
                f"groups of {size}: there are not so many"
            )
        if eligible < groups and self.topk // eligible != 2:
            raise ModelError(
                f"model config: {self.topk} experts per token from group_topk={eligible} (topk_group) of {groups} "
                f"groups is not supported: Megatron would rate a group by its {self.topk // eligible} best experts, "
                "and it must be by 2"
            )

    @property
    def has_shared(self) -> bool:
        return self.shared_ffn_hidden_size is not None


@dataclass(frozen=True)
class McaModelConfig:
    """A decoder-only transformer: RMSNorm, rotary positions, causal attention, SwiGLU."""

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
    rotary_base: float = 10000.0
    rope_scaling: RopeScaling | None = None
    sliding_window: int | None = None
    """Tokens that a query sees, its own included; None: all before it."""
    full_attention_layers: tuple[int, ...] = ()
    """Layers without the window, counted from 0."""
    latent_attention: LatentAttention | None = None
    moe: Experts | None = None
    mtp_num_layers: int = 0
    """Multi-token prediction layers after the last (https://arxiv.org/abs/2412.19437, 2.2)."""
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    attention_output_bias: bool = False
    mlp_bias: bool = False
    qk_layernorm: bool = False
    attention_dropout: float = 0.0
    initializer_range: float = 0.02
    source_dtype: str = "float32"
    """Dtype of most of the source's weights: what an export writes by default."""
    source_dtype_exceptions: dict[str, str] = field(default_factory=dict)
    """Hugging Face name → dtype, for the source's tensors that differ from `source_dtype`."""
    source_copies: tuple[str, ...] = ()
    """Hugging Face names under which the source stores a tensor a second time; an export writes them again."""
    hf_config: dict[str, Any] = field(default_factory=dict)
    """The source's config.json, whole."""

    def __post_init__(self) -> None:
        _check_sizes(self, *_SIZES)
        for name in ("full_attention_layers", "source_copies"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        if self.num_attention_heads % self.num_query_groups:
            raise ModelError(
                f"model config: {self.num_attention_heads} attention heads do not divide into "
                f"{self.num_query_groups} key/value heads"
            )
        if self.latent_attention is not None:
            self._check_latent_rope()
        elif self.kv_channels % 2:
            raise ModelError(
                f"model config: head size kv_channels={self.kv_channels} (head_dim) is odd; channels rotate in pairs"
            )

    def _check_latent_rope(self) -> None:
        """What Megatron's latent attention has of the scalings."""
        rope = self.rope_scaling
        if rope is None:
            return
        supported = "latent attention has yarn, with truncate true, alone"
        if not isinstance(rope, YarnRope):
            raise ModelError(f"model config: rope_scaling: {type(rope).__name__} is not supported; {supported}")
        if not rope.truncate:
            raise ModelError(f"model config: rope_scaling: truncate=False is not supported; {supported}")
        if rope.factor <= 1 and rope.attention_factor not in (None, 1):
            raise ModelError(
                f"model config: rope_scaling: attention_factor={rope.attention_factor} with factor={rope.factor} is "
                "not supported: latent attention has no attention factor where the factor is not greater than 1"
            )

    # Sizes that the weight tables name.

    @property
    def query_size(self) -> int:
        """Rows of the query projection: heads x head size."""
        return self.num_attention_heads * self.kv_channels

    @property
    def kv_size(self) -> int:
        """Rows of the key (or value) projection."""
        return self.num_query_groups * self.kv_channels

    @property
    def query_key_size(self) -> int:
        """Rows of the query projection of latent attention."""
        return self.num_attention_heads * self.latent_attention.qk_head_dim

    @property
    def key_value_up_size(self) -> int:
        """Rows of latent attention's projection to the keys' channels without position and to the values."""
        latent = self.latent_attention
        return self.num_attention_heads * (latent.qk_nope_head_dim + latent.v_head_dim)

    @property
    def twice_hidden_size(self) -> int:
        """What a multi-token prediction layer projects: an embedding and a hidden state."""
        return 2 * self.hidden_size

    @property
    def untied(self) -> bool:
        """The output layer has a weight of its own."""
        return not self.tie_word_embeddings

    # Layers that a row of a weight table is for.

    @property
    def moe_layers(self) -> tuple[int, ...]:
        return self.moe.layers if self.moe else ()

    @property
    def dense_layers(self) -> tuple[int, ...]:
        """Layers with a dense MLP."""
        moe = set(self.moe_layers)
        return tuple(i for i in range(self.num_layers) if i not in moe)

    @property
    def stacked_layers(self) -> bool:
        """A checkpoint stores the layers as one tensor with a leading axis: they are all alike."""
        return len(self.moe_layers) in (0, self.num_layers)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready, every field."""
        values = {"format_version": FORMAT_VERSION, **asdict(self)}
        if self.rope_scaling is not None:
            kind = next(name for name, cls in ROPE_TYPES.items() if type(self.rope_scaling) is cls)
            values["rope_scaling"] = {"rope_type": kind, **values["rope_scaling"]}
        return json.loads(json.dumps(values))  # tuples are lists, as in the file

    @classmethod
    def from_dict(cls, values: dict[str, Any], where: str = CONFIG_NAME) -> Self:
        """Inverse of `to_dict`. Raises ConfigError for an unknown or missing key, naming the nearest known one."""
        values = dict(values)
        version = values.pop("format_version", FORMAT_VERSION)
        if version != FORMAT_VERSION:
            raise ConfigError(f"{where}: format_version {version!r} is not {FORMAT_VERSION}; convert the model again")
        _check_keys(cls, values, where)
        for name, parts in (("latent_attention", LatentAttention), ("moe", Experts)):
            values[name] = _part(parts, values.get(name), f"{where}: {name}")
        values["rope_scaling"] = _rope(values.get("rope_scaling"), f"{where}: rope_scaling")
        return cls(**values)

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


def is_mca_checkpoint(directory: str | Path) -> bool:
    """Is this an MCA checkpoint directory (rather than a Hugging Face one)?"""
    return Path(directory, CONFIG_NAME).is_file()


def read_hf_config(directory: str | Path) -> dict[str, Any]:
    """The config.json of a Hugging Face model directory. Raises ModelError where there is none."""
    path = Path(directory, "config.json")
    if not path.is_file():
        raise ModelError(f"{directory}: neither {CONFIG_NAME} nor config.json; give the directory of a model")
    return read_json(path, ModelError)


def read_json(path: Path, error: type[Exception]) -> dict[str, Any]:
    """A JSON object from a file; `error` names the file when it is not one."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as e:
        raise error(f"{path}: not readable as JSON ({e})") from e
    if not isinstance(value, dict):
        raise error(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value


def _check_keys(cls: type, values: dict[str, Any], where: str) -> None:
    known = {f.name: f for f in fields(cls)}
    for key in values:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else f"; known keys: {', '.join(known)}"
            raise ConfigError(f"{where}: unknown key {key!r}{hint}")
    required = [n for n, f in known.items() if f.default is MISSING and f.default_factory is MISSING]
    if missing := [n for n in required if n not in values]:
        raise ConfigError(f"{where}: missing key {', '.join(missing)}")


def _part(cls: type, values: Any, where: str) -> Any:
    if values is None:
        return None
    if not isinstance(values, dict):
        raise ConfigError(f"{where} must be an object, found {values!r:.80}")
    _check_keys(cls, values, where)
    return cls(**values)


def _rope(values: Any, where: str) -> RopeScaling | None:
    if not isinstance(values, dict):
        return _part(LinearRope, values, where)
    values = dict(values)
    kind = values.pop("rope_type", None)
    if kind not in ROPE_TYPES:
        raise ConfigError(f"{where}: rope_type {kind!r} is not one of {', '.join(ROPE_TYPES)}")
    return _part(ROPE_TYPES[kind], values, where)


def _check_sizes(config: object, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        if type(value) is not int or value < 1:
            raise ModelError(f"model config: {name} must be a positive integer, found {value!r}")
