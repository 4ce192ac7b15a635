"""The parallel layout of a run, and the process groups that go with it.

    world = data × context × pipeline × tensor        ranks of one tensor group are neighbours

Sizes and their rules are in `mca_lib.models.layout`. The layout decides speed and memory, never the result. Ranks
come from torchrun's environment; without one, this process is a world of its own. On CPU the ranks talk by gloo, on
the loopback interface when they share a machine.
"""

import datetime
import itertools
import os
import random
from dataclasses import dataclass, field

from mca_lib.converter.mapping import TensorPlace
from mca_lib.errors import ConfigError
from mca_lib.models.layout import ARGUMENTS, Layout, model_ranks, rank_problems, size_problems, virtual_stages
from mca_lib.platforms import install

PROCESS_GROUP_TIMEOUT = datetime.timedelta(minutes=30)


@dataclass
class DistributingParallelArguments:
    """How the model and the batch are spread over the ranks."""

    tensor_model_parallel_size: int = field(default=1, metadata={"help": "Ranks that share each weight matrix."})
    pipeline_model_parallel_size: int = field(default=1, metadata={"help": "Ranks that share the stack of layers."})
    virtual_pipeline_model_parallel_size: int | None = field(
        default=None, metadata={"help": "Model chunks per pipeline rank (interleaved schedule)."}
    )
    context_parallel_size: int = field(default=1, metadata={"help": "Ranks that share each sequence."})
    expert_model_parallel_size: int = field(default=1, metadata={"help": "Ranks that share the experts of a layer."})
    expert_tensor_parallel_size: int | None = field(
        default=None, metadata={"help": "Ranks that share each expert; default: the tensor parallel size."}
    )
    sequence_parallel: bool = field(
        default=False, metadata={"help": "Split the activations between tensor parallel regions too."}
    )
    num_layers_in_first_pipeline_stage: int | None = field(
        default=None, metadata={"help": "Layers of the first pipeline rank, where it is not to have an equal share."}
    )
    num_layers_in_last_pipeline_stage: int | None = field(
        default=None, metadata={"help": "Layers of the last pipeline rank, where it is not to have an equal share."}
    )
    pipeline_model_parallel_layout: str | None = field(
        default=None,
        metadata={"help": "What each stage holds, in Megatron's notation, as Et*3|t*4L."},
    )

    @property
    def model_parallel_size(self) -> int:
        """Ranks that hold one replica of the model."""
        return model_ranks(Layout.from_args(self))

    def data_parallel_size(self, world_size: int) -> int:
        """Replicas of the model. Raises ConfigError when the layout does not fit `world_size` ranks."""
        self.check(world_size)
        return world_size // self.model_parallel_size

    def check(self, world_size: int) -> None:
        """Raise ConfigError naming the fields that contradict each other or the number of ranks."""
        layout = Layout.from_args(self)
        for problem in itertools.chain(size_problems(layout, ARGUMENTS), rank_problems(layout, world_size, ARGUMENTS)):
            raise ConfigError(problem)


def pipeline_communication(args: DistributingParallelArguments) -> dict[str, bool]:
    """Fields of Megatron's model config that decide how pipeline stages exchange tensors.

    With two stages and several chunks per stage, each rank's neighbour before and after is the same peer. Batched
    exchanges are then matched in posting order under gloo and swap activations with gradients: the loss looks right,
    the gradients are wrong (megatron-core 0.19.2; its own launcher refuses that combination).
    """
    interleaved = virtual_stages(Layout.from_args(args)) is not None
    return {"overlap_p2p_comm": interleaved, "batch_p2p_comm": not interleaved}


def initialize_model_parallel(args: DistributingParallelArguments, seed: int = 42) -> None:
    """Create the process groups of `args` and seed this rank. Raises ConfigError when the layout does not fit.

    An existing default process group is used as it is.
    """
    platform = install()
    args.check(int(os.environ.get("WORLD_SIZE", "1")))
    import torch.distributed as dist
    from megatron.core import parallel_state

    init_process_group(platform.backend)
    args.check(dist.get_world_size())
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=args.tensor_model_parallel_size,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=virtual_stages(Layout.from_args(args)),
        context_parallel_size=args.context_parallel_size,
        expert_model_parallel_size=args.expert_model_parallel_size,
        expert_tensor_parallel_size=args.expert_tensor_parallel_size,
    )
    seed_rank(seed)


def seed_rank(seed: int) -> None:
    """Seed every random generator of this rank; stages of a pipeline draw differently, replicas alike."""
    import numpy as np
    import torch
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    seed += 100 * parallel_state.get_pipeline_model_parallel_rank()
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed)


def tensor_place() -> TensorPlace:
    """Where this rank stands in its tensor parallel groups."""
    from megatron.core import parallel_state

    return TensorPlace(
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_tensor_model_parallel_world_size(),
        parallel_state.get_expert_tensor_parallel_rank(),
        parallel_state.get_expert_tensor_parallel_world_size(),
    )


def destroy_model_parallel() -> None:
    """Undo `initialize_model_parallel`; does nothing when there is nothing to undo."""
    import torch.distributed as dist
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()


def init_process_group(backend: str) -> None:
    """The default process group of torchrun's ranks, or of this process alone; one that exists is used as it is."""
    import torch.distributed as dist

    if dist.is_initialized():
        return
    if os.environ.get("LOCAL_WORLD_SIZE", "1") == os.environ.get("WORLD_SIZE", "1"):
        # One machine: no name look-up, and no other host can connect.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if "RANK" in os.environ:
        dist.init_process_group(backend, timeout=PROCESS_GROUP_TIMEOUT)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=PROCESS_GROUP_TIMEOUT)
