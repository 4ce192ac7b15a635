"""What the ranks of the gated delta net's tests run."""

from pathlib import Path
from typing import Any

from tests.mca_lib.models import parity_ranks


def works_by_itself() -> dict[str, bool]:
    """What Megatron can do without our answers."""
    import torch
    from megatron.core.ssm.gated_delta_net import GatedDeltaNet, common
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(num_layers=1, hidden_size=16, num_attention_heads=1)
    found = {"import flash-linear-attention": common.HAVE_FLA}
    try:
        GatedDeltaNet(config, None)
        found["build a layer"] = True
    except ImportError:
        found["build a layer"] = False
    except Exception:  # gone on, to what it was not given
        found["build a layer"] = True
    A_log, zero = torch.tensor([0.7], dtype=torch.bfloat16), torch.zeros(1)
    decay, _ = GatedDeltaNet._compute_g_and_beta(None, A_log, zero, zero, zero)
    exact = -A_log.double().exp() * torch.nn.functional.softplus(zero.double())
    found["compute a decay in fp32"] = bool((decay.double() - exact).abs() < 1e-6)
    return found


def kernels_after_installation() -> dict[str, bool]:
    """After two installations the modules of Megatron have our functions."""
    from megatron.core.ssm.gated_delta_net import common, gdn

    from mca_lib.models.linear_attention import reference_kernels as ours

    ours.install_reference_kernels()
    ours.install_reference_kernels()
    return {
        "l2norm": common.l2norm is ours.l2norm,
        "convolution": gdn.causal_conv1d is ours.causal_conv1d,
        "rule": gdn.chunk_gated_delta_rule is ours.chunk_gated_delta_rule,
    }


def compare_with_megatrons_output_norm(directory: Path, variant: str, layout: dict[str, Any]) -> parity_ranks.Errors:
    """As `parity_ranks.compare`, with the norm of the other layers in place of `HeadNorm`."""
    from mca_lib.models.linear_attention import gated_delta_net
    from mca_lib.models.norm import RMSNorm

    class Norm(RMSNorm):
        def __init__(self, config: Any, hidden_size: int, eps: float) -> None:
            super().__init__(config, hidden_size, eps, zero_centered=False)

    gated_delta_net.HeadNorm = Norm
    return parity_ranks.compare(directory, [variant], layout)[variant]
