"""Hybrids that are trained at several layouts: from a dense transformer and from one with experts, by its pattern.

Shared with `tests/acceptance/hybrid_layouts.py`.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from mca_lib.data.token_store import TokenStoreWriter
from tests.mca_lib.trainers.training import history, make_model, make_store, train

MAMBA = {"mamba_num_heads": 8, "mamba_head_dim": 8, "mamba_state_size": 16, "mamba_num_groups": 2}
HYBRIDS: dict[str, dict[str, Any]] = {
    "dense": {"hybrid_layer_pattern": "M*-*-M*-*-", **MAMBA},
    "experts": {"hybrid_layer_pattern": "M*E*EM*E", **MAMBA},
}
"""Model → arguments that make a hybrid of its transformer."""

TP2 = {"tensor_model_parallel_size": 2}
TP2_SP = {**TP2, "sequence_parallel": True}
PP2 = {"pipeline_model_parallel_size": 2}
VPP2 = {**PP2, "virtual_pipeline_model_parallel_size": 2}
CP2 = {"context_parallel_size": 2}
EP2 = {"expert_model_parallel_size": 2}
OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True}

LAYOUTS: dict[str, dict[str, tuple[int, dict[str, Any]]]] = {
    "dense": {
        "one rank": (1, {}),
        "DP2": (2, {}),
        "DP2 with overlap": (2, OVERLAP),
        "TP2": (2, TP2),
        "TP2 SP": (2, TP2_SP),
        "PP2": (2, PP2),
        "PP2, uneven by |": (2, {**PP2, "hybrid_layer_pattern": "M*-|*-M*-*-"}),
        "PP2 VPP2 by |": (2, {**VPP2, "hybrid_layer_pattern": "M|*-*-|M*|-*-"}),
        "CP2": (2, CP2),
        "TP2 PP2": (4, {**TP2, **PP2}),
        "TP2 CP2": (4, {**TP2, **CP2}),
        "micro batch of 2": (1, {"per_device_train_batch_size": 2}),
        "full recomputation": (1, {"recompute_granularity": "full"}),
        "selective recomputation": (1, {"recompute_granularity": "selective"}),
    },
    "experts": {
        "one rank": (1, {}),
        "DP2": (2, {}),
        "EP2": (2, EP2),
        "ETP2": (2, {"expert_tensor_parallel_size": 2}),
        "TP2 SP": (2, TP2_SP),
        "TP2 SP, EP2 ETP1": (2, {**TP2_SP, **EP2, "expert_tensor_parallel_size": 1}),
        "PP2": (2, PP2),
        "CP2": (2, CP2),
        "CP2 EP2": (2, {**CP2, **EP2}),
        "full recomputation": (1, {"recompute_granularity": "full"}),
    },
}
"""Model → layout → (ranks, arguments)."""


PACKINGS = {"packed": 4, "one by one": 8}
"""Store of the same eight documents -> its rows, all of which are one step."""


def make_sources(folder: Path) -> None:
    """`folder`/dense and `folder`/experts, transformers; `folder`/store and the stores of `PACKINGS`."""
    from tests.mca_lib.tiny_models import save_hf

    make_model(folder / "dense")
    save_hf(folder / "experts", "mixtral", num_hidden_layers=3)
    make_store(folder / "store", rows=12)
    random = np.random.default_rng(1)
    documents = [(random.integers(0, 12, n), random.random(n) < 0.7) for n in (5, 19, 8, 14, 3, 11, 17, 6)]
    for name, rows in PACKINGS.items():
        with TokenStoreWriter(folder / name / "train") as writer:
            for row in range(rows):
                writer.add_row(documents[row::rows])


def run(
    ranks: Callable[..., list[Any]],
    folder: Path,
    model: str,
    layout: str,
    *,
    store: str = "store",
    out: str | None = None,
    function: Callable[..., Any] = train,
    **options: Any,
) -> np.ndarray:
    """[steps, 2] loss and gradient norm of a training at a layout."""
    world_size, arguments = LAYOUTS[model][layout]
    places = [str(folder / name) for name in (model, store, out or f"{model} {layout} {store}")]
    return history(ranks(world_size, function, *places, {**HYBRIDS[model], **arguments, **options}))


def run_packings(
    ranks: Callable[..., list[Any]], folder: Path, model: str, layout: str, steps: int
) -> list[np.ndarray]:
    """`run` for each of `PACKINGS`; a step is all of its rows."""
    return [
        run(ranks, folder, model, layout, store=store, global_batch_size=rows, max_steps=steps)
        for store, rows in PACKINGS.items()
    ]
