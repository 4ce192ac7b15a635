"""Megatron-Core's Mamba layer without `mamba_ssm`, `causal_conv1d` and Transformer Engine.

Call `install_reference_kernels()` before anything imports `megatron.core.ssm.mamba_mixer`. It imports that module with
stand-ins for the two packages and takes these away again: nothing else in the process, transformers least of all, sees
them. With a GPU and both packages nothing is done. On CPU the reference is used although they may be installed, since
Triton's kernels need a GPU.

Seen with megatron-core 0.19.2. What is replaced, and why:

- `mamba_ssm` and `causal_conv1d` while `mamba_mixer` is imported: no mixer can be built without their kernels;
- their versions in `megatron.core.utils`, which are asked for when documents are packed;
- `tex` and `is_te_min_version` in `mamba_context_parallel`: packed documents under context parallelism are put in
  order by a function of Transformer Engine.
"""

import contextlib
import functools
import importlib
import importlib.util
import sys
import types
from collections.abc import Iterator
from importlib.machinery import ModuleSpec

import torch

from mca_lib.models.hybrid.gated_norm import RMSNormGated
from mca_lib.models.hybrid.ssd import mamba_chunk_scan_combined, mamba_split_conv1d_scan_combined
from mca_lib.models.packing import zigzag_index

MIXER = "megatron.core.ssm.mamba_mixer"
PACKAGES = ("mamba_ssm", "causal_conv1d")

# Module -> what Megatron takes from it. The versions pass its check for packed training, and not that for packed
# inference, which needs kernels that are not here. Without `causal_conv1d_fn` the mixer convolves with torch.
STAND_INS: dict[str, dict[str, object]] = {
    "causal_conv1d": {"__version__": "1.4.0"},
    "mamba_ssm": {"__version__": "2.0.0"},
    "mamba_ssm.ops": {},
    "mamba_ssm.ops.triton": {},
    "mamba_ssm.ops.triton.layernorm_gated": {"RMSNorm": RMSNormGated},
    "mamba_ssm.ops.triton.ssd_combined": {
        "mamba_chunk_scan_combined": mamba_chunk_scan_combined,
        "mamba_split_conv1d_scan_combined": mamba_split_conv1d_scan_combined,
    },
}


@functools.cache
def install_reference_kernels() -> None:
    """Make `megatron.core.ssm.mamba_mixer` work on this machine; calling it again does nothing.

    Raises RuntimeError when the mixer was imported before, with other kernels or none.
    """
    if kernels_usable():
        return
    if MIXER in sys.modules:
        raise RuntimeError(f"{MIXER} was imported before its kernels; call install_reference_kernels() first")
    with _stand_ins():
        importlib.import_module(MIXER)
        utils = importlib.import_module("megatron.core.utils")
        utils.get_mamba_version()
        utils.get_causal_conv1d_version()
    _order_packed_documents()


def kernels_usable() -> bool:
    """Whether both packages are installed and there is a GPU to run them."""
    return torch.cuda.is_available() and all(importlib.util.find_spec(name) for name in PACKAGES)


@contextlib.contextmanager
def _stand_ins() -> Iterator[None]:
    """`import mamba_ssm` and `import causal_conv1d` give the stand-ins; what was imported before comes back."""
    before = {name: module for name, module in sys.modules.items() if name.split(".")[0] in PACKAGES}
    for name in before:
        del sys.modules[name]
    for name, contents in STAND_INS.items():
        module = types.ModuleType(name, "Reference kernels of mca_lib.models.hybrid.")
        # `find_spec` raises for a module whose __spec__ is None.
        module.__spec__ = ModuleSpec(name, None, is_package=True)
        module.__path__ = []
        vars(module).update(contents)
        sys.modules[name] = module
    try:
        yield
    finally:
        for name in STAND_INS:
            del sys.modules[name]
        sys.modules.update(before)


def _order_packed_documents() -> None:
    """The order of packed documents under context parallelism, from the function that the model itself uses."""
    module = importlib.import_module("megatron.core.ssm.mamba_context_parallel")
    if module.tex is None:
        module.tex = types.SimpleNamespace(thd_get_partitioned_indices=partitioned_indices)
        module.is_te_min_version = lambda _version: True


def partitioned_indices(cu_seqlens: torch.Tensor, tokens: int, ranks: int, rank: int) -> torch.Tensor:
    """Positions in the row that a context parallel rank holds: Transformer Engine's `thd_get_partitioned_indices`.

    Args:
        cu_seqlens: cumulative lengths of the documents with their padding, to the end of the row.
        tokens: of the row over all ranks.

    Raises:
        DataError: a document does not divide into 2·ranks chunks.
    """
    bounds = cu_seqlens.tolist()
    if bounds[-1] < tokens:
        bounds.append(tokens)
    return _zigzag(tuple(bounds), ranks)[rank].to(cu_seqlens.device)


# Each Mamba layer asks for every rank's positions before and after its scan.
@functools.lru_cache(maxsize=4)
def _zigzag(bounds: tuple[int, ...], ranks: int) -> list[torch.Tensor]:
    return zigzag_index(bounds, ranks)
