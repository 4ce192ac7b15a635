"""Megatron-Core without an accelerator: the few calls that it makes to `torch.cuda`, answered for CPU and gloo.

One table, `ANSWERS`. Each row says which name is answered, with what, why, and which line of Megatron-Core needs it
(`used_by`, `mark`): the test walks over the table and fails when that line is gone, so a row never outlives its
reason. `probe` is an expression that must fail or be false in a bare process and be true after `install()`.

Seen with megatron-core 0.19.2 and torch 2.15.0. Nothing here is installed where there is an accelerator.
"""

import contextlib
import functools
import importlib
import logging
import queue
import resource
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from mca_lib.platforms.cpu_stand_ins import (
    CPU,
    NullStream,
    always,
    cpu_torch,
    fused_adam,
    get_rng_state,
    list_splits,
    set_rng_state,
    type_name,
    uneven_gather,
    uneven_reduce_scatter,
)


@dataclass(frozen=True)
class Answer:
    """One answered name.

    target   dotted path of what is replaced
    make     original -> replacement
    reason   what goes wrong without it
    used_by  module of Megatron-Core that needs it
    mark     text in the source of that module
    probe    expression over `torch` and `m` (importlib.import_module): false or raising without the answer
    """

    target: str
    make: Callable[[Any], Any]
    reason: str
    used_by: str
    mark: str
    probe: str


# fmt: off
TORCH_ANSWERS = (
    Answer("torch.cuda.current_device", always(lambda: CPU),
           "the device of almost every buffer; raises without a driver",
           "megatron.core.tensor_parallel.mappings", "device=torch.cuda.current_device()",
           "torch.empty(1, device=torch.cuda.current_device()).device.type == 'cpu'"),
    Answer("torch.cuda.synchronize", always(lambda *_: None),
           "called around every pipeline exchange; raises without a driver",
           "megatron.core.pipeline_parallel.p2p_communication", "torch.cuda.synchronize()",
           "torch.cuda.synchronize() is None"),
    Answer("torch.cuda.current_stream", always(lambda *_: NullStream()),
           "gradient buckets wait on it before they reduce; raises without a driver",
           "megatron.core.distributed.param_and_grad_buffer", "torch.cuda.current_stream()",
           "torch.cuda.current_stream().wait_event(None) is None"),
    Answer("torch.cuda.Stream", always(NullStream),
           "made for overlapped gradient reduction and MoE dispatch; raises without a driver",
           "megatron.core.distributed.distributed_data_parallel", "torch.cuda.Stream(",
           "torch.cuda.Stream().synchronize() is None"),
    Answer("torch.cuda.Event", always(NullStream),
           "constructed without a driver, but recording it raises",
           "megatron.core.transformer.transformer_layer", "torch.cuda.Event()",
           "torch.cuda.Event().record() is None"),
    Answer("torch.cuda.stream", always(lambda *_: contextlib.nullcontext()),
           "the context manager of a stream that does not exist",
           "megatron.core.distributed.param_and_grad_buffer", "torch.cuda.stream(self.communication_stream)",
           "isinstance(torch.cuda.stream(object()), __import__('contextlib').nullcontext)"),
    Answer("torch.cuda.get_rng_state", always(lambda *_, **__: torch.get_rng_state()),
           "the tracker of random states reads it; raises without a driver",
           "megatron.core.tensor_parallel.random", "torch.cuda.get_rng_state()",
           "torch.equal(torch.cuda.get_rng_state(), torch.get_rng_state())"),
    Answer("torch.cuda.manual_seed", always(lambda seed: torch.manual_seed(seed) and None),
           "queued until CUDA initializes, which never happens: ranks would draw alike",
           "megatron.core.tensor_parallel.random", "torch.cuda.manual_seed(data_parallel_seed)",
           "(torch.cuda.manual_seed(5), torch.initial_seed())[1] == 5"),
    Answer("torch.cuda.is_current_stream_capturing", always(lambda: False),
           "asked by the MoE dispatcher; raises without a driver",
           "megatron.core.transformer.moe.token_dispatcher", "torch.cuda.is_current_stream_capturing()",
           "torch.cuda.is_current_stream_capturing() is False"),
    Answer("torch.Tensor.cuda", always(lambda self, *_, **__: self),
           "moves control messages to the device; raises without a driver",
           "megatron.core.optimizer.distrib_optimizer", "send_tensor.cuda()",
           "torch.ones(1).cuda().device.type == 'cpu'"),
    Answer("torch.Tensor.type", type_name,
           "parameters of any other type name are refused by the optimizer and by gradient clipping",
           "megatron.core.optimizer.distrib_optimizer", "'torch.cuda.FloatTensor'",
           "torch.ones(1).type() == 'torch.cuda.FloatTensor'"),
    Answer("torch.distributed.all_to_all_single", list_splits,
           "gloo takes split sizes as lists only; the MoE dispatcher passes tensors",
           "megatron.core.tensor_parallel.mappings", "torch.distributed.all_to_all_single(",
           "hasattr(torch.distributed.all_to_all_single, '__wrapped__')"
           " and torch.distributed.all_to_all_single.__name__ == 'all_to_all_single'"
           " and 'list_splits' in torch.distributed.all_to_all_single.__code__.co_qualname"),
)

MEGATRON_ANSWERS = (
    Answer("megatron.core.optimizer.optimizer.torch", cpu_torch,
           "device='cuda' for loss scales and flags",
           "megatron.core.optimizer.optimizer", "device='cuda'",
           "m('megatron.core.optimizer.optimizer').torch.tensor([1.0], device='cuda').device.type == 'cpu'"),
    Answer("megatron.core.optimizer.grad_scaler.torch", cpu_torch,
           "device='cuda' for the loss scale of fp16",
           "megatron.core.optimizer.grad_scaler", "device='cuda'",
           "m('megatron.core.optimizer.grad_scaler').torch.tensor([1.0], device='cuda').device.type == 'cpu'"),
    Answer("megatron.core.optimizer.clip_grads.torch", cpu_torch,
           "device='cuda' for the gradient norm",
           "megatron.core.optimizer.clip_grads", "device='cuda'",
           "m('megatron.core.optimizer.clip_grads').torch.zeros(1, device='cuda').device.type == 'cpu'"),
    Answer("megatron.core.utils.torch", cpu_torch,
           "device='cuda' for the gradient norm, where apex is absent",
           "megatron.core.utils", 'device="cuda"',
           "m('megatron.core.utils').torch.tensor([1.0], device='cuda').device.type == 'cpu'"),
    Answer("megatron.core.models.common.embeddings.rope_utils.torch", cpu_torch,
           "pinned memory for a context parallel rank's share of the rotary table; raises without a driver",
           "megatron.core.models.common.embeddings.rope_utils", "pin_memory=True",
           "m('megatron.core.models.common.embeddings.rope_utils').torch.tensor([1], pin_memory=True).tolist() == [1]"),
    Answer("megatron.core.pipeline_parallel.schedules.torch", cpu_torch,
           "device='cuda' for the token count of a step",
           "megatron.core.pipeline_parallel.schedules", 'device="cuda"',
           "m('megatron.core.pipeline_parallel.schedules').torch.zeros([], device='cuda').device.type == 'cpu'"),
    Answer("megatron.core.dist_checkpointing.exchange_utils.torch", cpu_torch,
           "device='cuda' when ranks exchange shards on load",
           "megatron.core.dist_checkpointing.exchange_utils", 'device="cuda"',
           "m('megatron.core.dist_checkpointing.exchange_utils').torch.empty(1, device='cuda').device.type == 'cpu'"),
    Answer("megatron.core.dist_checkpointing.strategies.state_dict_saver.torch", cpu_torch,
           "device='cuda' when ranks agree on a cached save plan",
           "megatron.core.dist_checkpointing.strategies.state_dict_saver", "device='cuda'",
           "m('megatron.core.dist_checkpointing.strategies.state_dict_saver').torch.tensor([1], device='cuda')"
           ".device.type == 'cpu'"),
    Answer("megatron.core.tensor_parallel.random._set_cuda_rng_state", always(set_rng_state),
           "queued until CUDA initializes, which never happens: the tracker would never switch states",
           "megatron.core.tensor_parallel.random", "_lazy_call(cb)",
           "(m('megatron.core.tensor_parallel.random')._set_cuda_rng_state(torch.Generator().manual_seed(9).get_state()),"
           " torch.equal(torch.get_rng_state(), torch.Generator().manual_seed(9).get_state()))[1]"),
    Answer("megatron.core.tensor_parallel.random._get_cuda_rng_state", always(get_rng_state),
           "the counterpart of the row above",
           "megatron.core.tensor_parallel.random", "torch.cuda.random.get_rng_state(device=device)",
           "m('megatron.core.tensor_parallel.random')._get_cuda_rng_state() is not None"),
    Answer("megatron.core.tensor_parallel.mappings._gather_along_first_dim", uneven_gather,
           "gloo gathers equal shares only; experts that are split over ranks gather what the router sent to each",
           "megatron.core.tensor_parallel.mappings", "torch.distributed.all_gather(output_tensor_list",
           "'uneven_gather' in"
           " m('megatron.core.tensor_parallel.mappings')._gather_along_first_dim.__code__.co_qualname"),
    Answer("megatron.core.tensor_parallel.mappings._reduce_scatter_along_first_dim", uneven_reduce_scatter,
           "the counterpart of the row above",
           "megatron.core.tensor_parallel.mappings", "torch.distributed.reduce_scatter(output, input_tensor_list",
           "'uneven_reduce' in"
           " m('megatron.core.tensor_parallel.mappings')._reduce_scatter_along_first_dim.__code__.co_qualname"),
    Answer("megatron.core.optimizer.Adam", fused_adam,
           "torch's AdamW cannot resume under the distributed optimizer (see cpu_adam)",
           "megatron.core.optimizer", "adam_cls = Adam",
           "m('megatron.core.optimizer').Adam.__module__ == 'mca_lib.platforms.cpu_adam'"),
    Answer("megatron.core.optimizer.USING_PYTORCH_OPTIMIZER", always(False),
           "names the row above to the optimizer's factory",
           "megatron.core.optimizer", "if USING_PYTORCH_OPTIMIZER:",
           "m('megatron.core.optimizer').USING_PYTORCH_OPTIMIZER is False"),
    Answer("megatron.core.optimizer.distrib_optimizer.Adam", fused_adam,
           "the distributed optimizer accepts instances of this class only",
           "megatron.core.optimizer.distrib_optimizer", "isinstance(optimizer, (Adam, torch.optim.AdamW",
           "m('megatron.core.optimizer.distrib_optimizer').Adam.__module__ == 'mca_lib.platforms.cpu_adam'"),
    Answer("megatron.core.optimizer.distrib_optimizer.HAVE_APEX_OR_TE", always(True),
           "selects the state layout without a step tensor per parameter",
           "megatron.core.optimizer.distrib_optimizer", "if not HAVE_APEX_OR_TE:",
           "m('megatron.core.optimizer.distrib_optimizer').HAVE_APEX_OR_TE is True"),
    Answer("megatron.core.optimizer.distrib_optimizer.USING_APEX_OPTIMIZER", always(True),
           "keeps the step in the parameter group on save and load",
           "megatron.core.optimizer.distrib_optimizer", "USING_TE_OPTIMIZER or USING_APEX_OPTIMIZER",
           "m('megatron.core.optimizer.distrib_optimizer').USING_APEX_OPTIMIZER is True"),
    Answer("megatron.core.dist_checkpointing.strategies.filesystem_async._results_queue", lambda _: queue.Queue(),
           "else the first save spawns a manager process that imports torch again (10 s); threads write here",
           "megatron.core.dist_checkpointing.strategies.filesystem_async", "_results_queue = ctx.Manager().Queue()",
           "isinstance(m('megatron.core.dist_checkpointing.strategies.filesystem_async')._results_queue,"
           " __import__('queue').Queue)"),
)
# fmt: on

ANSWERS = TORCH_ANSWERS + MEGATRON_ANSWERS


def resolve(target: str) -> tuple[Any, str]:
    """The object that holds the last name of a dotted path, and that name."""
    parts = target.split(".")
    for cut in range(len(parts) - 1, 0, -1):
        with contextlib.suppress(ModuleNotFoundError):
            owner = importlib.import_module(".".join(parts[:cut]))
            return functools.reduce(getattr, parts[cut:-1], owner), parts[-1]
    raise ModuleNotFoundError(target)


@functools.cache
def install() -> None:
    """Answer everything in the table. Imports Megatron-Core, with compilation of its fused helpers turned off."""
    _apply(TORCH_ANSWERS)
    with _uncompiled(), _quiet():
        for answer in ANSWERS:
            importlib.import_module(answer.used_by)
        importlib.import_module("megatron.core.models.gpt")
    _apply(MEGATRON_ANSWERS)
    # On CPU the tracked random state *is* the CPU's, so the warning that it moved would come at every dropout.
    logging.getLogger("megatron.core.tensor_parallel.random").addFilter(
        lambda record: "CPU RNG state changed" not in record.getMessage()
    )


def peak_memory_bytes() -> int:
    """Largest resident set of this process."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _apply(answers: tuple[Answer, ...]) -> None:
    for answer in answers:
        owner, name = resolve(answer.target)
        setattr(owner, name, answer.make(getattr(owner, name)))


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without the warnings that Transformer Engine, apex and CUDA are absent: on CPU that is how it is."""
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        yield


@contextlib.contextmanager
def _uncompiled() -> Iterator[None]:
    """`torch.compile` as the identity while Megatron is imported.

    Megatron decorates its fused helpers with it at import: that imports inductor (2 s per process), and the first
    call would need a C++ compiler on the machine.
    """
    original = torch.compile
    torch.compile = lambda model=None, **_: model if model is not None else (lambda function: function)
    try:
        yield
    finally:
        torch.compile = original
