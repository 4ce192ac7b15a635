"""Initial weights of the Mamba-2 layers that a transformer gets, decided by a seed alone.

A tensor is drawn whole, by a generator of its own that the seed, the layer and the tensor's name make, so that it is
the same at every parallel layout and whichever other layers there are; a rank takes its share of it.

    A_log       log of U(1, 16): decay of a head
    dt_bias     softplus of it is log-uniform in [0.001, 0.1]: step of a head
    D, norms    ones
    conv1d      U(-1/√kernel, 1/√kernel), as torch's own layer
    in_proj     N(0, initializer_range)
    out_proj    N(0, initializer_range / √layers) as Megatron's, or zero: the hybrid starts as exactly the transformer

These are the distributions of Mamba-2's authors (https://arxiv.org/abs/2405.21060; `mamba_ssm.modules.mamba2`), which
`megatron.core.ssm.mamba_mixer` has too.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal

import torch

from mca_lib.converter.mapping import Shape
from mca_lib.models.config import McaModelConfig
from mca_lib.models.hybrid.weights import KEPT_IN_FP32, MAMBA_WEIGHTS
from mca_lib.models.naming import checkpoint_parameters
from mca_lib.named_random import named_generator
from mca_lib.parallel import tensor_place

type FreshMode = Literal["random", "zero_output"]
FRESH_MODES: tuple[FreshMode, ...] = ("random", "zero_output")

DECAYS = (1.0, 16.0)
STEPS = (1e-3, 1e-1)
SMALLEST_STEP = 1e-4


def fresh_tensors(
    config: McaModelConfig, layer: int, seed: int, mode: FreshMode = "random"
) -> Iterator[tuple[str, torch.Tensor]]:
    """(Name in the checkpoint, whole tensor in fp32) of every weight of one Mamba layer.

    Args:
        layer: number in the pattern, from 0.
    """
    if layer not in config.mamba_layers:
        raise ValueError(f"layer {layer} of {config.hybrid and config.hybrid.pattern!r} is no Mamba layer")
    if mode not in FRESH_MODES:
        raise ValueError(f"fresh layers are one of {', '.join(FRESH_MODES)}, not {mode!r}")
    for row in MAMBA_WEIGHTS:
        name = row.mca.format(layer=layer)
        yield name, _drawn(name, row.hf_shapes(config)[0], config, seed, mode)


def fresh_tensor(config: McaModelConfig, name: str, seed: int, mode: FreshMode = "random") -> torch.Tensor:
    """One tensor of `fresh_tensors`, by its name in the checkpoint."""
    kind = name.partition(".mixer.")[2]
    row = next(row for row in MAMBA_WEIGHTS if row.mca.endswith(f".mixer.{kind}"))
    return _drawn(name, row.hf_shapes(config)[0], config, seed, mode)


def fresh_dtype(name: str, dtype: torch.dtype) -> torch.dtype:
    """Dtype in a checkpoint of `dtype`."""
    return torch.float32 if name.endswith(KEPT_IN_FP32) else dtype


@torch.no_grad()
def fill_fresh(
    parameters: Iterable[tuple[str, torch.Tensor]],
    config: McaModelConfig,
    seed: int,
    mode: FreshMode,
    rank: int = 0,
    size: int = 1,
) -> list[str]:
    """Initialize the Mamba weights among a rank's `parameters`, given by their names in the checkpoint.

    Args:
        rank, size: of the tensor parallel group.

    Returns:
        names of those that were set
    """
    rows = {row.mca.format(layer=layer): row for row in MAMBA_WEIGHTS for layer in config.mamba_layers}
    filled = []
    for name, parameter in parameters:
        if name in rows:
            value = fresh_tensor(config, name, seed, mode)
            parameter.copy_(rows[name].to_mca([value], config, rank, size))
            filled.append(name)
    return filled


def fill_fresh_layers(models: Any, source: McaModelConfig, args: Any) -> None:
    """Initialize the layers of this rank's chunks that `source`, a transformer, does not have; none for a hybrid.

    Args:
        models: a `VirtualModels`.
        args: training arguments, which say how.
    """
    config = models.mca_config
    if source.hybrid is None and config.hybrid is not None:
        pairs = (pair for model in models for pair in checkpoint_parameters(model))
        place = tensor_place()
        fill_fresh(pairs, config, args.fresh_seed, args.fresh_layers, place.rank, place.size)


def _drawn(name: str, shape: Shape, config: McaModelConfig, seed: int, mode: FreshMode) -> torch.Tensor:
    kind = name.partition(".mixer.")[2]
    if kind == "out_proj.weight" and mode == "zero_output":
        return torch.zeros(shape)
    return _KINDS[kind](shape, named_generator(seed, name), config)


def _uniform(shape: Shape, generator: torch.Generator, low: float, high: float) -> torch.Tensor:
    return torch.empty(shape).uniform_(low, high, generator=generator)


def _ones(shape: Shape, generator: torch.Generator, config: McaModelConfig) -> torch.Tensor:
    return torch.ones(shape)


def _decays(shape: Shape, generator: torch.Generator, config: McaModelConfig) -> torch.Tensor:
    return _uniform(shape, generator, *DECAYS).log()


def _steps(shape: Shape, generator: torch.Generator, config: McaModelConfig) -> torch.Tensor:
    step = _uniform(shape, generator, *(math.log(limit) for limit in STEPS)).exp().clamp(min=SMALLEST_STEP)
    return step + torch.log(-torch.expm1(-step))  # inverse of softplus


def _convolution(shape: Shape, generator: torch.Generator, config: McaModelConfig) -> torch.Tensor:
    bound = 1 / math.sqrt(config.hybrid.mamba.conv_kernel)
    return _uniform(shape, generator, -bound, bound)


def _input(shape: Shape, generator: torch.Generator, config: McaModelConfig) -> torch.Tensor:
    return torch.randn(shape, generator=generator) * config.initializer_range


def _output(shape: Shape, generator: torch.Generator, config: McaModelConfig) -> torch.Tensor:
    return torch.randn(shape, generator=generator) * (config.initializer_range / math.sqrt(config.num_layers))


_KINDS: dict[str, Callable[[Shape, torch.Generator, McaModelConfig], torch.Tensor]] = {
    "in_proj.layer_norm_weight": _ones,
    "in_proj.weight": _input,
    "conv1d.weight": _convolution,
    "conv1d.bias": _convolution,
    "A_log": _decays,
    "D": _ones,
    "dt_bias": _steps,
    "norm.weight": _ones,
    "out_proj.weight": _output,
}
