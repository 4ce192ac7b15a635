"""What the ranks of the tests of Nemotron-H run."""

from pathlib import Path
from typing import Any

from tests.mca_lib.tiny_models import token_ids

SIZES: dict[str, Any] = {
    "vocab_size": 99,
    "hidden_size": 32,
    "intermediate_size": 48,
    "layers_block_type": ["linear_attention", "mlp", "full_attention", "moe", "linear_attention", "moe"],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "mamba_num_heads": 4,
    "mamba_head_dim": 16,
    "ssm_state_size": 8,
    "n_groups": 2,
    "conv_kernel": 3,
    "chunk_size": 16,
    "n_routed_experts": 8,
    "num_experts_per_tok": 4,
    "n_group": 4,
    "topk_group": 2,
    "moe_intermediate_size": 16,
    "moe_shared_expert_intermediate_size": 24,
    "routed_scaling_factor": 2.5,
    "layer_norm_epsilon": 1e-3,  # large enough to show
    "initializer_range": 0.2,
    # transformers does not let a step be shorter than this; Megatron has no limit, and neither had training.
    "time_step_min": 1e-9,
}


def save_nemotron(directory: Path, changes: dict[str, Any]) -> None:
    """A random model whose every weight counts."""
    import torch
    from transformers import NemotronHConfig, NemotronHForCausalLM

    torch.manual_seed(0)
    model = NemotronHForCausalLM(NemotronHConfig(**{**SIZES, **changes}))
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if "norm" in name or name.endswith((".D", ".dt_bias", "A_log")):
                tensor.uniform_(0.2, 1.2)
            elif name.endswith("bias"):
                tensor.uniform_(-0.3, 0.3)
    model.save_pretrained(directory)


def difference(directory: Path, length: int = 70) -> tuple[float, float]:
    """(Largest |Δ| between the logits of transformers and of Megatron, largest |logit|)."""
    import torch
    from transformers import AutoModelForCausalLM

    ids_BS = token_ids(length=length)
    with torch.no_grad():
        model = AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager").eval()
        hf_BSV = model(ids_BS, use_cache=False).logits
        from mca_lib.models import AutoModel
        from tests.mca_lib.models.factory_ranks import start

        models = AutoModel.from_pretrained(directory, start()).eval()
        mca_BSV = models[0](ids_BS, torch.arange(length).expand_as(ids_BS))
    return (hf_BSV - mca_BSV).abs().max().item(), hf_BSV.abs().max().item()
