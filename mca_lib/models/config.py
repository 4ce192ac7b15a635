"""`McaModelConfig`: what a model *is*, and nothing about how it is run.

It is the `mca_config.json` of a checkpoint: architecture only, so the same file serves every parallel layout and
precision. The source's Hugging Face config travels inside it untouched, so an export loses no field. No torch here:
preflight reads it in milliseconds. `mca_lib.models.transformer_config` turns it into Megatron's `TransformerConfig`.
"""

import difflib
import json
from dataclasses import MISSING, asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Self

from mca_lib.errors import CheckpointError, ConfigError, ModelError

CONFIG_NAME = "mca_config.json"
FORMAT_VERSION = 1

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
class Llama3Rope:
    """Llama 3's frequency-dependent rope scaling; every factor is the source's own, none has a default."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True)
class McaModelConfig:
    """A dense decoder-only transformer: RMSNorm, rotary positions, grouped-query attention, SwiGLU."""

    model_type: str
    """Hugging Face model type; names the family that maps config and weights."""
    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
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
    rope_scaling: Llama3Rope | None = None
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    attention_output_bias: bool = False
    qk_layernorm: bool = False
    attention_dropout: float = 0.0
    initializer_range: float = 0.02
    source_dtype: str = "float32"
    """Dtype of most of the source's weights: what an export writes by default."""
    source_dtype_exceptions: dict[str, str] = field(default_factory=dict)
    """Hugging Face name → dtype, for the source's tensors that differ from `source_dtype`."""
    hf_config: dict[str, Any] = field(default_factory=dict)
    """The source's config.json, whole."""

    def __post_init__(self) -> None:
        for name in _SIZES:
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ModelError(f"model config: {name} must be a positive integer, found {value!r}")
        if self.num_attention_heads % self.num_query_groups:
            raise ModelError(
                f"model config: {self.num_attention_heads} attention heads do not divide into "
                f"{self.num_query_groups} key/value heads"
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
    def untied(self) -> bool:
        """The output layer has a weight of its own."""
        return not self.tie_word_embeddings

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready, every field."""
        return {"format_version": FORMAT_VERSION, **asdict(self)}

    @classmethod
    def from_dict(cls, values: dict[str, Any], where: str = CONFIG_NAME) -> Self:
        """Inverse of `to_dict`. Raises ConfigError for an unknown or missing key, naming the nearest known one."""
        values = dict(values)
        version = values.pop("format_version", FORMAT_VERSION)
        if version != FORMAT_VERSION:
            raise ConfigError(f"{where}: format_version {version!r} is not {FORMAT_VERSION}; convert the model again")
        known = {f.name: f for f in fields(cls)}
        for key in values:
            if key not in known:
                near = difflib.get_close_matches(key, known, n=1)
                hint = f"; did you mean {near[0]!r}?" if near else f"; known keys: {', '.join(known)}"
                raise ConfigError(f"{where}: unknown key {key!r}{hint}")
        if missing := [n for n in _required(cls) if n not in values]:
            raise ConfigError(f"{where}: missing key {', '.join(missing)}")
        if values.get("rope_scaling") is not None:
            values["rope_scaling"] = Llama3Rope(**values["rope_scaling"])
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


def _required(cls: type) -> list[str]:
    return [f.name for f in fields(cls) if f.default is MISSING and f.default_factory is MISSING]
