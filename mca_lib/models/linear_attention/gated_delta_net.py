"""The gated delta net of a transformer layer, in the place of attention: Megatron's, with two gaps filled.

Seen with megatron-core 0.19.2:

- its output norm sees the heads of this rank, so that under tensor parallelism without sequence parallelism the
  gradient of its weight is this rank's part, which Megatron does not sum: `HeadNorm` does;
- it takes the exponential of `A_log` in the dtype of the weights. transformers, and so the models, take it in fp32.

The norm's weight is 1 where it is neutral, as in the source, although the model's other norms are zero-centred.
Megatron-Bridge stores it less 1 instead.
"""

import torch
import torch.nn.functional as F
from megatron.core.ssm.gated_delta_net import GatedDeltaNet as MegatronGatedDeltaNet
from megatron.core.ssm.gated_delta_net import GatedDeltaNetSubmodules
from megatron.core.tensor_parallel.mappings import copy_to_tensor_model_parallel_region
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig

from mca_lib.models.linear_attention.reference_kernels import install_reference_kernels
from mca_lib.models.norm import RMSNorm


class GatedDeltaNet(MegatronGatedDeltaNet):
    """Megatron's layer, whose decay is computed in fp32."""

    def _compute_g_and_beta(
        self, A_log: torch.Tensor, dt_bias: torch.Tensor, alpha: torch.Tensor, beta: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Logarithm of the decay, fp32, and the rate of writing."""
        return -A_log.float().exp() * F.softplus(alpha.float() + dt_bias), beta.sigmoid()


class HeadNorm(RMSNorm):
    """RMSNorm over each head of this rank, with a weight that all ranks have in common and 1 where it is neutral."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__(config, hidden_size, eps, zero_centered=False)
        self.sums_gradient = not config.sequence_parallel

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = copy_to_tensor_model_parallel_region(self.weight) if self.sums_gradient else self.weight
        return F.rms_norm(x, self.normalized_shape, weight, self.eps)


def gated_delta_net_spec(in_proj: type, out_proj: type) -> ModuleSpec:
    """Specification of the layer, of the backend's column and row parallel linear layers."""
    install_reference_kernels()
    parts = GatedDeltaNetSubmodules(in_proj=in_proj, out_norm=HeadNorm, out_proj=out_proj)
    return ModuleSpec(module=GatedDeltaNet, submodules=parts)
