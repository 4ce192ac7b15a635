"""Digest of the weights that adapters are trained on, the same on every rank."""

from pathlib import Path

import torch.distributed as dist

from mca_lib.checkpoint.digest import json_digest, weights_digest
from mca_lib.checkpoint.sealed import file_digest
from mca_lib.checkpoint.verify import WEIGHTS_FOLDER
from mca_lib.models.config import is_mca_checkpoint


def base_digest(directory: str | Path) -> str:
    """Of an MCA checkpoint's tensors, or of a Hugging Face directory's safetensors files; rank 0 reads them once."""
    directory, box = Path(directory), [""]
    if dist.get_rank() == 0:
        if is_mca_checkpoint(directory):
            box = [weights_digest(directory / WEIGHTS_FOLDER)]
        else:
            files = sorted(directory.glob("*.safetensors"))
            box = [json_digest([[path.name, file_digest(path)] for path in files])]
    dist.broadcast_object_list(box, src=0)
    return box[0]
