"""The memory that is foretold is the memory that the trainer's engine allocates."""

from dataclasses import replace
from typing import Any

import pytest

from mca_lib.errors import ConfigError
from mca_lib.models.config import McaModelConfig
from mca_lib.models.layout import Layout
from mca_lib.models.layout_rules import chunks_of
from mca_lib.models.memory import StageMemory, Training, chunk_tensors, stage_memory
from mca_lib.models.registry import config_from_hf
from mca_lib.models.size import local_parts
from mca_lib.verification.tiny import tiny_config
from mca_lib.verification.tiny_configs import TINY
from tests.mca_lib.models import memory_ranks
from tests.mca_lib.models.hybrid.configs import HYBRIDS, hybrid_config

ON_RANKS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "one rank": ("qwen3", 1, {}),
    "two replicas": ("mistral", 2, {}),
    "TP2, two replicas": ("llama", 4, {"tensor": 2}),
    "PP2 with a tied output layer": ("qwen3", 2, {"pipeline": 2}),
    "PP2 with two chunks": ("qwen2", 2, {"pipeline": 2, "virtual_pipeline": 2}),
    "CP2 shares the optimizer": ("llama", 2, {"context": 2}),
    "experts over two ranks": ("mixtral", 2, {"expert": 2}),
    "experts whole, the rest halved": (
        "qwen2_moe",
        2,
        {"tensor": 2, "expert_tensor": 1, "sequence_parallel": True},
    ),
    "latent attention, expert biases, multi-token prediction": ("deepseek_v3", 2, {"expert": 2}),
    "Mamba layers over two ranks": ("dense", 2, {"tensor": 2}),
    "Mamba layers, and experts over two ranks": ("experts", 2, {"expert": 2}),
}


TRAININGS = [("bf16", True), ("bf16", False), ("fp32", True), ("fp32", False)]
"""(precision, distributed optimizer)"""


@pytest.mark.parametrize("case", ON_RANKS)
def test_bytes_are_those_that_the_engine_allocates(ranks: Any, case: str) -> None:
    name, world_size, sizes = ON_RANKS[case]
    config = hybrid_config(name) if name in HYBRIDS else config_from_hf(tiny_config(name))
    layout = Layout(**sizes)
    by_rank = ranks(world_size, memory_ranks.allocated, config, sizes, TRAININGS)
    for training, found in zip(TRAININGS, zip(*by_rank, strict=True), strict=True):
        foretold = stage_memory(config, layout, Training(*training), world_size)
        for report in found:
            stage = foretold[report["stage"]]
            assert (report["weights"], report["gradients"]) == (stage.weights, stage.gradients), training
        for stage in foretold:
            # Replicas share the optimizer state; each has its part, together they have all of it.
            held = [report["optimizer"] for report in found if report["stage"] == stage.stage]
            assert sum(held) == pytest.approx(stage.optimizer * len(held), abs=2 * len(held)), training


def test_tensors_add_up_to_the_parameters_of_each_part() -> None:
    for config in [*(config_from_hf(tiny_config(model_type)) for model_type in TINY), hybrid_config("experts")]:
        layout = Layout(pipeline=2)
        for stage, chunks in enumerate(chunks_of(config, layout)):
            tensors = [t for chunk in chunks for t in chunk_tensors(config, layout, chunk)]
            counted = sum(local_parts(config, layout, stage).values())
            assert sum(t.elements * t.count for t in tensors) == counted, config.model_type


@pytest.fixture
def config() -> McaModelConfig:
    return config_from_hf(tiny_config("qwen2"))


def one_stage(config: McaModelConfig, layout: Layout = Layout(), ranks: int = 1, **training: Any) -> StageMemory:  # noqa: B008
    return stage_memory(config, layout, Training(**training), ranks)[0]


def test_activations_of_a_layer_are_the_papers_terms_for_this_architecture(config: McaModelConfig) -> None:
    """Korthikanti et al. 2022, section 4.1, without dropout and scores: norms and their outputs 8sbh, queries and
    attention output 4sbq, keys and values 4sbk, SwiGLU 6sbf, statistics of the softmax 4sba."""
    one = replace(config, num_layers=1)
    two = replace(config, num_layers=2)
    tokens = 16
    layer = 8 * 32 + 4 * config.query_size + 4 * config.kv_size + 6 * 48 + 4 * 4
    difference = one_stage(two, sequence_length=tokens).activations - one_stage(one, sequence_length=tokens).activations
    assert difference == tokens * layer


def test_activations_of_a_hybrid_are_those_of_its_parts() -> None:
    """A layer's norm keeps 4h bytes per token; a Mamba layer beside it what is projected (2i + 2gn + heads) and twice
    the recurrence's i outputs."""
    hybrid = hybrid_config("dense")
    tokens, mamba = 16, hybrid.hybrid.mamba
    layer = 4 * 32 + 2 * (4 * mamba.inner_size + 2 * mamba.group_size + mamba.num_heads)
    without = one_stage(hybrid.transformer, sequence_length=tokens).activations
    assert one_stage(hybrid, sequence_length=tokens).activations - without == 2 * tokens * layer


def test_a_checkpoint_is_gathered_whole_on_every_rank(config: McaModelConfig) -> None:
    """Measured on one rank in bf16: 35.9 and 36.0 bytes per weight (docs/log.md)."""
    parameters = one_stage(config).parameters
    assert one_stage(config).saving == 36 * parameters
    assert one_stage(config, ranks=4).saving == 27 * parameters
    assert one_stage(config, distributed_optimizer=False).saving == 14 * parameters


def test_activations_shrink_with_what_shares_them(config: McaModelConfig) -> None:
    whole = one_stage(config).activations
    assert one_stage(config, recompute="selective").activations < whole
    assert one_stage(config, recompute="full").activations < one_stage(config, recompute="selective").activations
    assert one_stage(config, Layout(context=2), 2).activations == whole / 2
    plain = one_stage(config, Layout(tensor=2), 2).activations
    sequence = one_stage(config, Layout(tensor=2, sequence_parallel=True), 2).activations
    assert whole / 2 <= sequence < plain < whole
    assert one_stage(config, micro_batch_size=2).activations == 2 * whole


def test_the_first_stage_of_a_pipeline_holds_as_many_micro_batches_as_there_are_stages(config: McaModelConfig) -> None:
    middle = [s.activations for s in stage_memory(config, Layout(pipeline=4), Training(), 4)]
    layer = middle[0] / 4
    assert middle[:3] == [4 * layer, 3 * layer, 2 * layer]


def test_ranks_that_do_not_fit_are_refused(config: McaModelConfig) -> None:
    with pytest.raises(ConfigError, match="3 ranks cannot be split"):
        one_stage(config, Layout(tensor=2), 3)
