"""Parallel layouts that tests run, by name, and the arguments that ask for them."""

from typing import Any

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one rank": (1, {}),
    "TP2": (2, {"tensor": 2}),
    "TP2 with sequence parallel": (2, {"tensor": 2, "sequence_parallel": True}),
    "PP2": (2, {"pipeline": 2}),
    "PP2 with two chunks each": (2, {"pipeline": 2, "virtual_pipeline": 2}),
    "CP2": (2, {"context": 2}),
    "TP2 PP2": (4, {"tensor": 2, "pipeline": 2}),
    "PP2 uneven": (2, {"pipeline": 2, "first_stage_layers": 1}),
    "PP2 custom layout": (2, {"pipeline": 2, "pipeline_layout": "Et|t*3L"}),
    "PP2 custom layout, output layer alone": (2, {"pipeline": 2, "pipeline_layout": "Et*4|L"}),
    "PP2 VPP2 custom": (2, {"pipeline": 2, "virtual_pipeline": 2, "pipeline_layout": "E|t*2|t|tL"}),
}
"""Name → (ranks, parallel sizes)."""

EXPERT_LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "TP2 with sequence parallel": (2, {"tensor": 2, "sequence_parallel": True}),
    "TP2 with whole experts": (2, {"tensor": 2, "sequence_parallel": True, "expert_tensor": 1}),
    "PP2": (2, {"pipeline": 2}),
    "PP2 with two chunks each": (2, {"pipeline": 2, "virtual_pipeline": 2}),
    "CP2": (2, {"context": 2}),
    "EP2": (2, {"expert": 2}),
    "TP2 EP2": (4, {"tensor": 2, "sequence_parallel": True, "expert": 2}),
    "PP2 EP2": (4, {"pipeline": 2, "expert": 2}),
}
"""The same for models with experts, which Megatron trains under tensor parallelism with sequence parallelism only."""


def layout_args(
    tensor: int = 1,
    pipeline: int = 1,
    virtual_pipeline: int | None = None,
    context: int = 1,
    expert: int = 1,
    expert_tensor: int | None = None,
    sequence_parallel: bool = False,
    first_stage_layers: int | None = None,
    last_stage_layers: int | None = None,
    pipeline_layout: str | None = None,
    bf16: bool = False,
    fp16: bool = False,
) -> Any:
    """Training arguments, as far as a model needs them."""
    from mca_lib.parallel import DistributingParallelArguments

    args = DistributingParallelArguments(
        tensor_model_parallel_size=tensor,
        pipeline_model_parallel_size=pipeline,
        virtual_pipeline_model_parallel_size=virtual_pipeline,
        context_parallel_size=context,
        expert_model_parallel_size=expert,
        expert_tensor_parallel_size=expert_tensor,
        num_layers_in_first_pipeline_stage=first_stage_layers,
        num_layers_in_last_pipeline_stage=last_stage_layers,
        pipeline_model_parallel_layout=pipeline_layout,
        sequence_parallel=sequence_parallel,
    )
    args.bf16, args.fp16 = bf16, fp16
    return args
