"""The two sides of `mfu`: operations that a step needs, and how many of them this machine makes in a second.

The latter is measured once per run, with square matrices of the run's dtype that keep the device busy, by all ranks at
the same time, so that ranks which share cores share the peak. It is kept beside the checkpoints: a resumed run reports
by the same peak, and another device or dtype or number of ranks is measured anew. With fp8 it is the peak of bf16.
"""

import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist

from mca_lib.adapters.settings import targets_of
from mca_lib.adapters.targets import adapter_elements
from mca_lib.checkpoint.collective import from_rank_0
from mca_lib.models.config import McaModelConfig
from mca_lib.models.flops import frozen_elements, step_flops
from mca_lib.models.freeze import frozen_weights
from mca_lib.platforms import current_platform

if TYPE_CHECKING:
    from peft import LoraConfig

NAME = "peak_flops.json"
SIZES = {"cuda": 8192, "cpu": 512}
REPEATS = 7


def flops_counter(
    config: McaModelConfig, lora: "LoraConfig | None", freeze: Sequence[str] = ()
) -> Callable[[np.ndarray], int]:
    """Tokens of each document of a step → floating point operations that the model needs for them."""
    adapters = adapter_elements(config, targets_of(lora), lora.r) if lora else None
    frozen = frozen_elements(config, frozen_weights(config, freeze))
    return partial(step_flops, config, adapter_elements=adapters, frozen=frozen)


def peak_flops(output_dir: Path, dtype: torch.dtype) -> float:
    """Floating point operations per second of all ranks together; all ranks take part."""
    path, key = output_dir / NAME, f"{dist.get_world_size()} x {_device_name()}, {dtype}"
    known = from_rank_0(lambda: _known(path))
    if key in known:
        return known[key]
    dist.barrier()
    measured = torch.tensor(_measure(dtype), dtype=torch.float64, device=current_platform().device)
    dist.all_reduce(measured)
    known[key] = float(measured)
    if dist.get_rank() == 0:
        temporary = path.with_suffix(".tmp")
        temporary.write_text(json.dumps(known, indent=1))
        os.replace(temporary, path)
    return known[key]


def _known(path: Path) -> dict[str, float]:
    """What was measured before; a file that a crash has spoilt is measured anew."""
    try:
        known = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    numbers = known.items() if isinstance(known, dict) else ()
    return {key: value for key, value in numbers if isinstance(value, int | float) and value > 0}


def _measure(dtype: torch.dtype) -> float:
    """Of the faster form: median over some products, after one that is not counted."""
    device = current_platform().device
    size = SIZES[device.type]
    # Of its own generator: the run's random numbers are not touched. Values do matter for a GPU's power.
    generator = torch.Generator(device).manual_seed(0)
    left, right = (torch.randn(size, size, generator=generator, device=device).to(dtype) for _ in range(2))
    # As a linear layer multiplies, and plainly: on CPU one or the other is slow, by dtype (fp16 by a factor of 10).
    forms = (left, right.T), (left, right)
    seconds = [[_time(*form) for _ in range(1 + REPEATS)][1:] for form in forms]
    return 2 * size**3 / min(map(statistics.median, seconds))


def _time(left: torch.Tensor, right: torch.Tensor) -> float:
    wait = torch.cuda.synchronize if left.is_cuda else (lambda: None)
    wait()
    began = time.perf_counter()
    torch.mm(left, right)
    wait()
    return time.perf_counter() - began


def _device_name() -> str:
    if current_platform().device_type == "cuda":
        return torch.cuda.get_device_name()
    return f"{platform.node()}, {torch.get_num_threads()} threads"
