"""The code of exported hybrids: copied beside the weights, recognized there, known to transformers. No torch at import.

transformers runs the Python files of a model directory only where it is told to trust them, and here it never is. A
hybrid whose files are, byte for byte, the ones that an export writes is loaded with the code of this package.
"""

import shutil
from pathlib import Path

from mca_lib.errors import ModelError
from mca_lib.models.config import McaModelConfig, read_json
from mca_lib.models.families.mcaflow_hybrid import AUTO_MAP, MODEL_TYPE

CODE = Path(__file__).parent / "remote_code"


def code_files() -> list[Path]:
    """The files that belong to a model, sorted."""
    return sorted(CODE.glob("*_mcaflow_hybrid.py"))


def copy_code(folder: Path) -> list[str]:
    """Write the code into a model's directory; returns the names."""
    for path in code_files():
        shutil.copyfile(path, folder / path.name)
    return [path.name for path in code_files()]


def admit_own_code(directory: str | Path) -> None:
    """Let transformers load this directory with `trust_remote_code` off, where it is a hybrid that was exported here.

    Raises ModelError as `is_own_code`, for a config that its code would take and that means nothing, and for weights
    that do not fit: transformers leaves those out that the config has no layer for.
    """
    if not is_own_code(directory):
        return
    from mca_lib.converter.hf_source import HfSource
    from mca_lib.converter.model_converter import ModelConverter

    with HfSource(directory) as source:
        ModelConverter(McaModelConfig.from_pretrained(directory)).plan(source.tensors)

    from transformers import AutoConfig, AutoModelForCausalLM

    from mca_lib.converter.remote_code.configuration_mcaflow_hybrid import McaflowHybridConfig
    from mca_lib.converter.remote_code.modeling_mcaflow_hybrid import McaflowHybridForCausalLM

    AutoConfig.register(MODEL_TYPE, McaflowHybridConfig, exist_ok=True)
    AutoModelForCausalLM.register(McaflowHybridConfig, McaflowHybridForCausalLM, exist_ok=True)


def is_own_code(directory: str | Path) -> bool:
    """Is the code that transformers would run for this model ours, unchanged?

    False for a model without code of its own.

    Raises ModelError for a hybrid of ours whose code is missing or was changed.
    """
    directory = Path(directory)
    path = directory / "config.json"
    hf = read_json(path, ModelError) if path.is_file() else {}
    if hf.get("model_type") != MODEL_TYPE:
        return False
    if hf.get("auto_map") != AUTO_MAP:
        raise ModelError(f"{path}: auto_map is not the one that an export writes; export the model again")
    for own in code_files():
        found = directory / own.name
        if not found.is_file() or found.read_bytes() != own.read_bytes():
            raise ModelError(
                f"{found}: is not the code that this version exports, and code of others is not run; export the model "
                "again"
            )
    return True
