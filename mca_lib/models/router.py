"""The router of experts: losses that balance them, and counts of their tokens, the same at every layout.

The load balancing loss of a row (https://arxiv.org/abs/2101.03961, equation 4, for k experts per token):

    aux = E Σ_i f_i P_i      f_i: share of the row's T·k choices that fell on expert i of E
                             P_i: mean over the row's T tokens of the router's probability of i

It is 1 where all experts are chosen alike. A row is what a data set packs into one training sequence; with one row per
micro batch this is Megatron's `aux_loss`. Megatron (0.19.2) takes the micro batch as a whole, so that the loss depends
on its size, and where ranks share a row it weighs each rank's part by the tokens that this rank happens to hold.

Both losses here are handed to the backward pass as sums over tokens, T·aux for a row, like all losses; their scale,
`moe_grad_scale_func`, makes of these a mean over all tokens of a step that are no padding.

N tokens on this rank, E experts, R rows of the micro batch.
"""

import torch
from megatron.core.tensor_parallel import reduce_from_tensor_model_parallel_region
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.moe.router import TopKRouter


class RowRouter(TopKRouter):
    """Megatron's router; `RowMoELayer` tells it which token belongs to which row."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)
        self.rows_N: torch.Tensor | None = None
        """Row of each token, from 1; 0 for padding."""
        self.rows_per_micro_batch = 1
        """Set by whoever trains."""
        self.reset_counts()

    def reset_counts(self) -> None:
        self.tokens_E = torch.zeros(self.num_experts, dtype=torch.float64, device=torch.cuda.current_device())
        """Choices of each expert since the last reset, in training, by tokens of this rank that are no padding."""
        self.aux_sum = torch.zeros((), dtype=torch.float64, device=torch.cuda.current_device())
        """This rank's part of Σ T·aux since then, without its coefficient."""

    def _apply_aux_loss(
        self,
        probs: torch.Tensor,
        scores_for_aux_loss: torch.Tensor,
        routing_map: torch.Tensor,
        with_padding_mask: bool = False,
    ) -> torch.Tensor:
        """`probs`, whose backward pass brings the gradient of Σ T·aux."""
        coefficient = self.get_aux_loss_coeff("aux_loss")
        if coefficient == 0:
            return probs
        chosen_RE = reduce_from_tensor_model_parallel_region(self._by_row(routing_map), self.tp_cp_group)
        tokens_R = chosen_RE.sum(dim=1) / self.topk
        products_R = (chosen_RE * self._by_row(scores_for_aux_loss)).sum(dim=1)
        loss = (products_R / tokens_R.clamp(min=1)).sum() * self.num_experts / self.topk
        self.aux_sum += loss.detach()
        return MoEAuxLossAutoScaler.apply(probs, coefficient * loss)

    def _apply_expert_bias(self, routing_map: torch.Tensor, padding_mask: torch.Tensor | None = None) -> None:
        """Counts for the log and for Megatron's update of the biases. Its own (0.19.2) fails with a mask."""
        if not (self.training and torch.is_grad_enabled()):  # of activations computed twice the second time counts
            return
        with torch.no_grad():
            chosen_NE = routing_map if padding_mask is None else routing_map & ~padding_mask[:, None]
            tokens_E = chosen_NE.sum(dim=0)
            self.tokens_E += tokens_E
            if self.enable_expert_bias:
                self.local_tokens_per_expert += tokens_E

    def _by_row(self, values_NE: torch.Tensor) -> torch.Tensor:
        """[R, E] sums over each row's tokens of this rank."""
        rows_N = self.rows_N if self.rows_N is not None else torch.ones(len(values_NE), dtype=torch.int64)
        sums = values_NE.new_zeros(1 + self.rows_per_micro_batch, self.num_experts, dtype=torch.float32)
        return sums.index_add(0, rows_N.to(values_NE.device), values_NE.float())[1:]


class RowMoELayer(MoELayer):
    """Megatron's layer, whose mask says which row a token belongs to."""

    def forward(
        self,
        hidden_states: torch.Tensor,
        intermediate_tensors: tuple[torch.Tensor, ...] | None = None,
        padding_mask: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """`padding_mask` [1, S]: the row of each token from 1, 0 for padding; all of a sequence that ranks share."""
        if padding_mask is None:
            self.router.rows_N = None
            return super().forward(hidden_states, intermediate_tensors)
        rows_1N = padding_mask
        if rows_1N.shape[1] != len(hidden_states):  # Megatron splits it on the first pipeline stage alone
            rows_1N = rows_1N.chunk(self.tp_group.size(), dim=1)[self.tp_group.rank()]
        self.router.rows_N = rows_1N[0]
        return super().forward(hidden_states, intermediate_tensors, rows_1N == 0)
