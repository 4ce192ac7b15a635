"""Five models of full size, as figures: the plan of their conversion and their memory, without a weight.

    python -m mca_lib.verification.full_size [NAME ...] [--against-transformers]

The configs are public hyper-parameters. With `--against-transformers` the plan is held against the names and shapes of
transformers' own model, built on the meta device; without it, against those that the family's table gives.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mca_lib.converter.plan import Plan, TensorInfo, entries, make_plan
from mca_lib.models import size
from mca_lib.models.config import McaModelConfig
from mca_lib.models.layout import Layout
from mca_lib.models.layout_rules import check_training_layout
from mca_lib.models.memory import StageMemory, Training, stage_memory
from mca_lib.models.registry import config_from_hf
from mca_lib.verification.layouts import layout_name

_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_DEEPSEEK_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 40.0,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}

CONFIGS: dict[str, dict[str, Any]] = {
    "Llama-3.1-405B": {
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": 16384,
        "intermediate_size": 53248,
        "num_hidden_layers": 126,
        "num_attention_heads": 128,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_parameters": _LLAMA3,
    },
    "Qwen2.5-72B": {
        "model_type": "qwen2",
        "vocab_size": 152064,
        "hidden_size": 8192,
        "intermediate_size": 29568,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
    },
    "Mixtral-8x22B": {
        "model_type": "mixtral",
        "vocab_size": 32000,
        "hidden_size": 6144,
        "intermediate_size": 16384,
        "num_hidden_layers": 56,
        "num_attention_heads": 48,
        "num_key_value_heads": 8,
        "max_position_embeddings": 65536,
        "rms_norm_eps": 1e-5,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
    },
    "Qwen3-235B-A22B": {
        "model_type": "qwen3_moe",
        "vocab_size": 151936,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "moe_intermediate_size": 1536,
        "num_hidden_layers": 94,
        "num_attention_heads": 64,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
    },
    "DeepSeek-V3": {
        "model_type": "deepseek_v3",
        "vocab_size": 129280,
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "moe_intermediate_size": 2048,
        "num_hidden_layers": 61,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "n_group": 8,
        "topk_group": 4,
        "first_k_dense_replace": 3,
        "routed_scaling_factor": 2.5,
        "norm_topk_prob": True,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "num_nextn_predict_layers": 1,
        "max_position_embeddings": 163840,
        "rms_norm_eps": 1e-6,
        "rope_parameters": _DEEPSEEK_YARN,
    },
}

LAYOUTS: dict[str, tuple[int, Layout, Training]] = {
    "Llama-3.1-405B": (
        1024,
        Layout(tensor=8, pipeline=16, sequence_parallel=True, first_stage_layers=7, last_stage_layers=7),
        Training(),
    ),
    "Qwen2.5-72B": (64, Layout(tensor=8, pipeline=4, sequence_parallel=True), Training()),
    "Mixtral-8x22B": (
        64,
        Layout(tensor=2, pipeline=4, expert=8, expert_tensor=1, sequence_parallel=True),
        Training(recompute="full"),
    ),
    "Qwen3-235B-A22B": (
        256,
        Layout(
            tensor=4,
            pipeline=8,
            expert=16,
            expert_tensor=1,
            sequence_parallel=True,
            first_stage_layers=11,
            last_stage_layers=11,
        ),
        Training(),
    ),
    "DeepSeek-V3": (
        1024,
        Layout(pipeline=16, expert=64, expert_tensor=1, first_stage_layers=4, last_stage_layers=1),
        Training(recompute="full"),
    ),
}
"""(ranks, layout, training) that a user might choose; 126, 94 and 61 layers do not divide evenly."""


@dataclass(frozen=True)
class FullSize:
    """One row of the table."""

    name: str
    config: McaModelConfig
    plan: Plan
    seconds: float
    """What the plan took."""
    ranks: int
    layout: Layout
    training: Training
    stages: tuple[StageMemory, ...]


def full_size(name: str, *, against_transformers: bool = False, num_layers: int | None = None) -> FullSize:
    """Plan and memory of one model.

    Args:
        num_layers: so many layers of it, for a quicker look; the memory is that of the whole model.

    Raises:
        ModelError: the plan is not complete.
        ConfigError: the layout does not fit.
    """
    config = config_from_hf(CONFIGS[name])
    hf = CONFIGS[name] | ({"num_hidden_layers": num_layers} if num_layers else {})
    source = transformers_tensors(hf) if against_transformers else table_tensors(config_from_hf(hf))
    begin = time.perf_counter()
    plan = make_plan(config_from_hf(hf), source)
    seconds = time.perf_counter() - begin
    ranks, layout, training = LAYOUTS[name]
    check_training_layout(config, layout)
    stages = stage_memory(config, layout, training, ranks)
    return FullSize(name, config, plan, seconds, ranks, layout, training, stages)


def table_tensors(config: McaModelConfig) -> dict[str, TensorInfo]:
    """What a bf16 checkpoint of this config holds, by the family's table."""
    return {
        name: TensorInfo(shape, "bfloat16")
        for entry in entries(config)
        for name, shape in zip(entry.hf, entry.mapping.hf_shapes(config), strict=True)
    }


def transformers_tensors(hf: dict[str, Any]) -> dict[str, TensorInfo]:
    """What transformers would save for this config, from its model on the meta device.

    transformers does not build multi-token prediction layers; theirs come from the table.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.core_model_loading import revert_weight_conversion

    values = dict(hf)
    with torch.device("meta"):
        config = AutoConfig.for_model(values.pop("model_type"), **values)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    state = revert_weight_conversion(model, model.state_dict())
    found = {name: TensorInfo(tuple(t.shape), str(t.dtype).removeprefix("torch.")) for name, t in state.items()}
    extra = f"model.layers.{hf['num_hidden_layers']}."
    return found | {n: info for n, info in table_tensors(config_from_hf(hf)).items() if n.startswith(extra)}


_COLUMNS = ("weights", "gradients", "optimizer", "activations", "total")


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser("python -m mca_lib.verification.full_size", description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(CONFIGS))
    parser.add_argument("--against-transformers", action="store_true")
    arguments = parser.parse_args(argv)
    if unknown := [name for name in arguments.names if name not in CONFIGS]:
        parser.error(f"{unknown[0]}: none of {', '.join(CONFIGS)}")
    for name in arguments.names or CONFIGS:
        row = full_size(name, against_transformers=arguments.against_transformers)
        tensors = sum(len(e.hf) for e in row.plan.entries)
        print(
            f"{name}: {size.total(row.config):,} parameters, {size.active(row.config):,} active per token; "
            f"plan of {tensors:,} tensors complete in {row.seconds:.2f} s; {row.ranks} ranks, "
            f"{layout_name(row.layout)}, sequences of {row.training.sequence_length}, "
            f"recomputation {row.training.recompute}"
        )
        print("".join(f"{title:>13}" for title in ("stage", "layers", *_COLUMNS)) + "   GiB per rank")
        for stage in row.stages:
            gib = [f"{getattr(stage, column) / 2**30:.1f}" for column in _COLUMNS]
            print("".join(f"{value:>13}" for value in (stage.stage, stage.layers, *gib)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
