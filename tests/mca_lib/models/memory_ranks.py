"""What the ranks of the memory tests run: the engine that trains, and the bytes of what it allocates."""

from collections.abc import Iterator
from typing import Any

from mca_lib.models.config import McaModelConfig


def allocated(config: McaModelConfig, sizes: dict[str, Any], trainings: list[tuple[str, bool]]) -> list[dict[str, int]]:
    """For each (precision, distributed optimizer): place of this rank, and bytes after one step."""
    from mca_lib.models.layout import ARGUMENTS
    from mca_lib.parallel import initialize_model_parallel
    from mca_lib.trainers import Seq2SeqTrainingArguments

    layout = {ARGUMENTS[name]: value for name, value in sizes.items()}
    reports = []
    for precision, distributed in trainings:
        args = Seq2SeqTrainingArguments(
            output_dir="unused", bf16=precision == "bf16", use_distributed_optimizer=distributed, **layout
        )
        if not reports:
            initialize_model_parallel(args)
        reports.append(_allocated(config, args))
    return reports


def _allocated(config: McaModelConfig, args: Any) -> dict[str, int]:
    import torch
    from megatron.core import parallel_state

    from mca_lib.models import AutoModel
    from mca_lib.trainers.engine import Engine
    from mca_lib.trainers.loss import TokenObjective

    models = AutoModel.from_config(config, args)
    engine = Engine(list(models), args, 1, TokenObjective())
    engine.optimizer.step()
    biases = [b for m in models for n, b in m.named_buffers() if n.endswith("expert_bias") and b is not None]
    buffers = [b for chunk in engine.chunks for b in chunk.buffers + chunk.expert_parallel_buffers]
    weights = [b.param_data for b in buffers] if args.use_distributed_optimizer else list(models.parameters())
    return {
        "stage": parallel_state.get_pipeline_model_parallel_rank(),
        "weights": size(weights) + size(biases),
        "gradients": size(b.grad_data for b in buffers),
        "optimizer": size(t for t in optimizer_tensors(engine.optimizer) if torch.is_tensor(t)),
    }


def optimizer_tensors(optimizer: Any) -> Iterator[Any]:
    """Moments, and fp32 copies of weights of another precision."""
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        for state in part.optimizer.state.values():
            yield from (state["exp_avg"], state["exp_avg_sq"])
        for name in ("shard_fp32_from_float16_groups", "fp32_from_float16_groups"):
            for group in getattr(part, name, ()):
                yield from group


def size(tensors: Any) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)
