"""Process groups: sizes follow the layout, and a layout that does not fit says which field is wrong."""

import pytest

from mca_lib.errors import ConfigError
from mca_lib.parallel import (
    DistributingParallelArguments,
    destroy_model_parallel,
    initialize_model_parallel,
    pipeline_communication,
)


def group_sizes(args: DistributingParallelArguments) -> tuple[int, int, int, int]:
    from megatron.core import parallel_state as state

    initialize_model_parallel(args)
    sizes = (
        state.get_tensor_model_parallel_world_size(),
        state.get_pipeline_model_parallel_world_size(),
        state.get_context_parallel_world_size(),
        state.get_data_parallel_world_size(),
    )
    destroy_model_parallel()
    return sizes


@pytest.mark.parametrize(
    ("world_size", "args", "sizes"),
    [
        (1, DistributingParallelArguments(), (1, 1, 1, 1)),
        (2, DistributingParallelArguments(), (1, 1, 1, 2)),
        (4, DistributingParallelArguments(tensor_model_parallel_size=2), (2, 1, 1, 2)),
        (4, DistributingParallelArguments(2, 2), (2, 2, 1, 1)),
        (2, DistributingParallelArguments(context_parallel_size=2), (1, 1, 2, 1)),
    ],
    ids=lambda value: str(value) if not isinstance(value, DistributingParallelArguments) else "",
)
def test_data_parallelism_is_what_the_layout_leaves(ranks, world_size, args, sizes):
    assert ranks(world_size, group_sizes, args) == [sizes] * world_size


def alone() -> tuple[int, int]:
    """Without torchrun's environment and without a process group, as in a plain script."""
    import os

    import torch.distributed as dist

    dist.destroy_process_group()
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        del os.environ[name]
    initialize_model_parallel(DistributingParallelArguments())
    initialized = dist.get_world_size()
    destroy_model_parallel()
    destroy_model_parallel()
    return initialized, int(dist.is_initialized())


def test_a_plain_process_is_a_world_of_its_own(ranks):
    assert ranks(1, alone) == [(1, 0)]


@pytest.mark.parametrize(
    ("args", "world_size", "named"),
    [
        (DistributingParallelArguments(tensor_model_parallel_size=2), 3, "tensor_model_parallel_size=2"),
        (DistributingParallelArguments(tensor_model_parallel_size=0), 1, "tensor_model_parallel_size: 0"),
        (DistributingParallelArguments(virtual_pipeline_model_parallel_size=2), 2, "pipeline_model_parallel_size"),
        (DistributingParallelArguments(sequence_parallel=True), 2, "sequence_parallel"),
        (DistributingParallelArguments(expert_model_parallel_size=4), 2, "2 ranks .* expert_model_parallel_size=4"),
        (
            DistributingParallelArguments(2, expert_model_parallel_size=2, expert_tensor_parallel_size=2),
            2,
            "expert_tensor_parallel_size=2 × expert_model_parallel_size=2 × pipeline_model_parallel_size=1 = 4",
        ),
    ],
)
def test_a_layout_that_does_not_fit_names_the_field(args, world_size, named):
    with pytest.raises(ConfigError, match=named) as caught:
        args.check(world_size)
    assert "\n" not in str(caught.value)


def test_interleaved_pipelines_do_not_batch_their_exchanges():
    interleaved = DistributingParallelArguments(pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2)
    assert pipeline_communication(interleaved) == {"overlap_p2p_comm": True, "batch_p2p_comm": False}
