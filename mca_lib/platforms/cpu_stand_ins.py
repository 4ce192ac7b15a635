"""What stands in for CUDA on a machine without it; `mca_lib.platforms.cpu` says where each is used, and why."""

import functools
import types
from collections.abc import Callable
from typing import Any

import torch

CPU = torch.device("cpu")


class NullStream:
    """Stands for a CUDA stream or event: on CPU every operation is done when its call returns."""

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        pass

    def wait_stream(self, _stream: Any) -> None:
        pass

    def wait_event(self, _event: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def record_event(self, event: Any = None) -> Any:
        return event or NullStream()

    def record(self, _stream: Any = None) -> None:
        pass


class CpuTorch(types.ModuleType):
    """The module `torch` as a Megatron module sees it: factories read device="cuda" as CPU and pin nothing.

    Replacing the factories in `torch` itself would break `with torch.device("meta")`, which knows them by identity:
    transformers then loads models with uninitialized rotary frequencies (seen with 5.24.0).
    """

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def tensor(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return torch.tensor(*args, **_without_cuda(kwargs))

    def zeros(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return torch.zeros(*args, **_without_cuda(kwargs))

    def empty(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return torch.empty(*args, **_without_cuda(kwargs))

    def empty_like(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return torch.empty_like(*args, **_without_cuda(kwargs))


def _without_cuda(kwargs: dict[str, Any]) -> dict[str, Any]:
    kwargs = {name: value for name, value in kwargs.items() if name != "pin_memory"}
    device = kwargs.get("device")
    return {**kwargs, "device": CPU} if device is not None and str(device).startswith("cuda") else kwargs


def cpu_torch(_original: Any) -> CpuTorch:
    return CpuTorch("torch")


def type_name(original: Callable[..., Any]) -> Callable[..., Any]:
    """`Tensor.type()` that reports the CUDA spelling, which Megatron compares against."""

    @functools.wraps(original)
    def type_(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs:
            return original(self, *args, **kwargs)
        return original(self).replace("torch.", "torch.cuda.", 1)

    return type_


def list_splits(original: Callable[..., Any]) -> Callable[..., Any]:
    """`all_to_all_single` that turns split sizes given as tensors into lists."""

    @functools.wraps(original)
    def all_to_all_single(output: Any, input: Any, output_split_sizes=None, input_split_sizes=None, *rest, **kwargs):
        def as_list(sizes: Any) -> Any:
            return sizes.tolist() if isinstance(sizes, torch.Tensor) else sizes

        return original(output, input, as_list(output_split_sizes), as_list(input_split_sizes), *rest, **kwargs)

    return all_to_all_single


def uneven_gather(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Gather along the first axis that takes shares of different lengths: they travel padded to the longest."""

    @functools.wraps(original)
    def gather(input_: torch.Tensor, group: Any, output_split_sizes: list[int] | None = None, *rest: Any) -> Any:
        if output_split_sizes is None:
            return original(input_, group, None, *rest)
        padded = input_.new_zeros(max(output_split_sizes), *input_.shape[1:])
        padded[: len(input_)] = input_
        shares = [torch.empty_like(padded) for _ in output_split_sizes]
        torch.distributed.all_gather(shares, padded, group=group)
        return torch.cat([share[:size] for share, size in zip(shares, output_split_sizes, strict=True)])

    return gather


def uneven_reduce_scatter(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Reduce-scatter along the first axis that takes shares of different lengths: all is summed, each takes its own."""

    @functools.wraps(original)
    def reduce_scatter(input_: torch.Tensor, group: Any, input_split_sizes: list[int] | None = None, *rest: Any) -> Any:
        if input_split_sizes is None:
            return original(input_, group, None, *rest)
        total = input_.clone()
        torch.distributed.all_reduce(total, group=group)
        return total.split(input_split_sizes)[group.rank()].clone()

    return reduce_scatter


def fused_adam(_original: Any) -> type:
    from mca_lib.platforms.cpu_adam import FusedAdam

    return FusedAdam


def always(value: Any) -> Callable[[Any], Any]:
    """The answer that does not build on the original."""
    return lambda _original: value


def set_rng_state(state: torch.Tensor, device: Any = -1, graph_safe: bool = False) -> None:
    torch.set_rng_state(state)


def get_rng_state(device: Any = "cuda", clone: bool = False, graph_safe: bool = False) -> torch.Tensor:
    return torch.get_rng_state()
