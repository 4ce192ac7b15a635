"""What the ranks of the fsdp_dtensor tests run: trainings under Megatron-FSDP, and loads of what they wrote."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

BATCH, LENGTH = 4, 16
STEPS, AFTER = 3, 2


def allow_fsdp() -> None:
    """What Megatron-FSDP asks of CUDA beyond `mca_lib.platforms.cpu`, answered for CPU and gloo (0.19.2)."""
    import torch
    from torch.distributed.device_mesh import DeviceMesh

    from mca_lib.platforms import install
    from mca_lib.platforms.cpu_stand_ins import CPU, CpuTorch, NullStream

    install()
    from megatron.core.distributed.fsdp.src.megatron_fsdp import megatron_fsdp, param_and_grad_buffer

    class Torch(CpuTorch):
        def device(self, *_: Any) -> torch.device:
            return CPU

    megatron_fsdp.torch = Torch("torch")
    param_and_grad_buffer._coalescing_manager = one_by_one
    torch.cuda.empty_cache = lambda: None
    NullStream.wait = NullStream.synchronize
    init, from_group = DeviceMesh.__init__, DeviceMesh.from_group

    def on_cpu(self: DeviceMesh, device_type: str, *args: Any, **kwargs: Any) -> None:
        init(self, "cpu", *args, **kwargs)

    def of_group(group: Any, device_type: str = "", *args: Any, **kwargs: Any) -> DeviceMesh:
        return from_group(group, "cpu", *args, **kwargs)

    DeviceMesh.__init__, DeviceMesh.from_group = on_cpu, staticmethod(of_group)


@contextlib.contextmanager
def one_by_one(group: Any, async_ops: bool = False) -> Iterator[Any]:
    """In place of `_coalescing_manager`: each collective is sent as it comes, and done when its call returns.

    That is what our stand-ins for streams say of all operations. Megatron-FSDP (0.19.2) gathers buckets ahead of their
    use instead, with gloo's coalesced gather (torch 2.15.0), whose worker thread destroys a
    `gloo::transport::tcp::UnboundBuffer` that has lost a reference too many: by chance, once in some ten thousand
    gathers, a rank ends with SIGSEGV or SIGABRT.
    """
    import torch.distributed as dist

    gather = dist.all_gather_into_tensor
    dist.all_gather_into_tensor = lambda *args, async_op=False, **named: gather(*args, **named)
    try:
        yield SimpleNamespace(wait=lambda: None)
    finally:
        dist.all_gather_into_tensor = gather


def gathered(size: int) -> bool:
    """Whether what Megatron-FSDP gathers ahead is there when the call returns."""
    import torch
    import torch.distributed as dist

    allow_fsdp()
    from megatron.core.distributed.fsdp.src.megatron_fsdp.param_and_grad_buffer import _coalescing_manager

    own, whole = torch.full((size,), 1.0 + dist.get_rank()), torch.zeros(2 * size)
    with _coalescing_manager(dist.group.WORLD, async_ops=True):
        dist.all_gather_into_tensor(output_tensor=whole, input_tensor=own, group=dist.group.WORLD, async_op=True)
    return torch.equal(whole, torch.tensor([1.0, 2.0]).repeat_interleave(size))


def training_args(**options: Any) -> Any:
    from mca_lib.trainers import Seq2SeqTrainingArguments

    defaults = {"output_dir": "/nowhere", "global_batch_size": BATCH, "learning_rate": 1e-3, "bf16": True}
    return Seq2SeqTrainingArguments(**{**defaults, "lr_scheduler_type": "constant", "weight_decay": 0.1, **options})


def fsdp_engine(models: Any, args: Any) -> Any:
    """Our engine around Megatron-FSDP's wrapper."""
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.distributed.fsdp.mcore_fsdp_adapter import FullyShardedDataParallel
    from megatron.core.transformer.module import Float16Module

    from mca_lib.platforms.cpu_stand_ins import CPU
    from mca_lib.trainers import engine
    from mca_lib.trainers.loss import TokenObjective

    config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=True,
        use_megatron_fsdp=True,
        gradient_reduce_div_fusion=False,  # gloo has no PREMUL_SUM
        data_parallel_sharding_strategy="optim_grads_params",
        overlap_grad_reduce=True,
        overlap_param_gather=True,
    )
    engine.wrap = lambda chunk, _args, _index: FullyShardedDataParallel(
        chunk.config, config, Float16Module(chunk.config, chunk), device=CPU
    )
    return engine.Engine(models, args, 100, TokenObjective())


def our_engine(models: Any, args: Any) -> Any:
    from mca_lib.trainers.engine import Engine
    from mca_lib.trainers.loss import TokenObjective

    return Engine(models, args, 100, TokenObjective())


def steps(engine: Any, first: int, last: int) -> list[tuple[float, float]]:
    """(loss, gradient norm) of the steps `first:last`, whose rows do not depend on the layout."""
    import numpy as np
    import torch
    from megatron.core import parallel_state

    from mca_lib.data.token_store import Row
    from mca_lib.trainers.batches import Alignment, collate

    history = []
    places = np.arange(LENGTH)
    for step in range(first, last):
        tokens_BT = np.random.default_rng(step).integers(0, 12, (BATCH, LENGTH + 1))
        mine = range(parallel_state.get_data_parallel_rank(), BATCH, parallel_state.get_data_parallel_world_size())
        rows = [Row(tokens_BT[i, :-1], tokens_BT[i, 1:], places, np.array([LENGTH]), np.array([i])) for i in mine]
        batches = [collate([row], LENGTH, Alignment.of(engine.args), torch.device("cpu"), 0, 1) for row in rows]
        metrics = engine.train_step(batches)
        history.append((metrics.loss, metrics.grad_norm))
    return history


def write(model: Path, directory: Path, **options: Any) -> list[tuple[float, float]]:
    """Train STEPS steps under Megatron-FSDP and save as Megatron-LM does; returns (loss, norm) of AFTER more steps."""
    import argparse

    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp

    from mca_lib.checkpoint.fsdp_hybrid import FORMAT, as_stored

    engine = start(model, fsdp=True, **options)
    steps(engine, 0, STEPS)
    (chunk,), optimizer = engine.chunks, engine.optimizer
    weights = chunk.module.state_dict_for_save_checkpoint()  # first: it brings the shards into the model
    moments = optimizer.sharded_state_dict({}, is_loading=False, metadata=FORMAT)
    state = as_stored(chunk, weights, moments)
    dist.barrier()
    dcp.save(
        {**state, "iteration": STEPS, "args": argparse.Namespace(seq_length=LENGTH)},
        storage_writer=dcp.FileSystemWriter(directory),
    )
    return steps(engine, STEPS, STEPS + AFTER)


def start(model: Path, *, fsdp: bool = False, pattern: str | None = None, **options: Any) -> Any:
    """An engine around the model of a directory, under Megatron-FSDP or as our trainer has it."""
    from mca_lib.models import AutoModel
    from mca_lib.parallel import initialize_model_parallel

    args = training_args(**options, **({"hybrid_layer_pattern": pattern} if pattern else {}))
    if fsdp:
        allow_fsdp()
    initialize_model_parallel(args, 1)
    models = AutoModel.from_pretrained(model, args)
    return (fsdp_engine if fsdp else our_engine)(models.models, args)


def go_on(model: Path, checkpoint: Path, state: Path | None = None, **options: Any) -> dict[str, Any]:
    """Load into our engine. Returns the step, (loss, norm) of the AFTER steps that follow; writes our own state."""
    import torch.distributed as dist
    from megatron.core import dist_checkpointing

    from mca_lib.checkpoint.fsdp_load import load_fsdp_dtensor
    from mca_lib.checkpoint.training import sharded_state

    engine = start(model, **options)
    step = load_fsdp_dtensor(checkpoint, engine, optimizer=True)
    if state is not None:
        if dist.get_rank() == 0:
            state.mkdir()
        dist.barrier()
        dist_checkpointing.save(sharded_state(engine, is_loading=False), str(state))
    groups = [g["step"] for part in engine.optimizer.chained_optimizers for g in part.optimizer.param_groups]
    return {"step": step, "adam": groups, "history": steps(engine, STEPS, STEPS + AFTER)}


def go_on_under_fsdp(model: Path, checkpoint: Path, leave_out: str = "", **options: Any) -> dict[str, Any]:
    """A hybrid under Megatron-FSDP loads a transformer's checkpoint. Returns as `go_on`, with the learning rates and
    whether fresh layers are as they were.

    Args:
        leave_out: the mend of Megatron that is not made, `groups` or `weights`.
    """
    from mca_lib.checkpoint import fsdp_hybrid

    engine = start(model, fsdp=True, **options)
    config, chunk = engine.bare_chunks[0].mca_config, engine.chunks[0]
    fresh = {f".layers.{i}." for i in config.mamba_layers}

    def masters() -> dict[str, Any]:
        state = chunk.module.state_dict_for_save_checkpoint()
        mamba = {k: v for k, v in state.items() if any(layer in k for layer in fresh) and "_extra_state" not in k}
        return {name: value.to_local().clone() for name, value in mamba.items()}

    before = masters()
    if leave_out == "groups":
        fsdp_hybrid._carried_back = lambda own, *_: own
    elif leave_out == "weights":
        chunk.module.install_optimized_model_weights = lambda: None
    step = fsdp_hybrid.load_gpt_into_fsdp_hybrid(chunk, engine.optimizer, checkpoint, config)
    after, groups = masters(), engine.optimizer.optimizer.param_groups
    return {
        "step": step,
        "adam": [group["step"] for group in groups],
        "rates": [group["lr"] for group in groups],
        "fresh": [before[name].equal(value) for name, value in after.items()],
        "history": steps(engine, STEPS, STEPS + AFTER),
    }


def run(name: str, options: dict[str, Any], *arguments: Any) -> Any:
    """Call a function of this module with keyword options, which a rank pool does not pass."""
    return globals()[name](*arguments, **options)
