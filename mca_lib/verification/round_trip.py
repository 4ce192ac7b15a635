"""Are the weights of two Hugging Face directories the same, bit by bit?"""

from pathlib import Path

import torch

from mca_lib.converter.hf_source import HfSource
from mca_lib.verification.difference import RoundTrip


def compare_weights(source: Path, returned: Path) -> RoundTrip:
    """Compare tensor by tensor, two in memory at a time."""
    with HfSource(source) as before, HfSource(returned) as after:
        names = before.tensors.keys() | after.tensors.keys()
        different = [
            name
            for name in sorted(names)
            if before.tensors.get(name) != after.tensors.get(name) or not _same_bytes(before, after, name)
        ]
        return RoundTrip(len(before.tensors), tuple(different))


def _same_bytes(before: HfSource, after: HfSource, name: str) -> bool:
    first, second = (source.slice(name)[:].contiguous().flatten() for source in (before, after))
    # As integers: zeros of different sign are equal as numbers.
    return torch.equal(first.view(torch.uint8), second.view(torch.uint8))
