"""Stage *export*: the trained checkpoint becomes a Hugging Face directory."""

from typing import Literal

from pydantic import Field

from tasks.section import Section


class ExportConfig(Section):
    """The Hugging Face directory at the end."""

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """`auto` is the dtype of the source model."""
    max_shard_size: str = Field(default="5GB", pattern=r"^\d+(\.\d+)?(KB|MB|GB)$")
