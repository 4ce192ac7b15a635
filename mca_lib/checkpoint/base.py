"""Digest of the weights that adapters are trained on, the same on every rank."""

from pathlib import Path

from mca_lib.checkpoint.collective import from_rank_0
from mca_lib.checkpoint.digest import json_digest, weights_digest
from mca_lib.checkpoint.sealed import file_digest
from mca_lib.checkpoint.verify import WEIGHTS_FOLDER
from mca_lib.models.config import is_mca_checkpoint


def base_digest(directory: str | Path) -> str:
    """Of an MCA checkpoint's tensors, or of a Hugging Face directory's safetensors files; rank 0 reads them once.

    Raises CheckpointError, on every rank, when a checkpoint is damaged.
    """
    directory = Path(directory)

    def compute() -> str:
        if is_mca_checkpoint(directory):
            return weights_digest(directory / WEIGHTS_FOLDER)
        return json_digest([[path.name, file_digest(path)] for path in sorted(directory.glob("*.safetensors"))])

    return from_rank_0(compute)
