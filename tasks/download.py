"""Stage *download*: a model directory, pinned to exact bytes."""

from typing import Literal

from pydantic import Field

from tasks.section import Section


class ModelConfig(Section):
    """Where the model comes from."""

    name_or_path: str = Field(min_length=1)
    """Local directory in Hugging Face format, or a repository id such as `Qwen/Qwen3-0.6B`."""
    source: Literal["auto", "local", "huggingface", "modelscope"] = "auto"
    """`auto` takes a local directory where one exists, else the Hugging Face Hub."""
    revision: str = "main"
    """Branch, tag or commit of a hub repository; resolved to a commit, which is recorded."""
    allow_pickle: bool = False
    """Accept `pytorch_model*.bin`, whose loading can run code, where there is no safetensors file."""
    trust_remote_code: bool = False
    """Run Python code that the model repository carries."""
