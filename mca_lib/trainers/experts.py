"""What training does with the routers of experts: the weight of their losses, and figures about the balance."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.module import MegatronModule

from mca_lib.models.router import RowRouter
from mca_lib.trainers.batches import MicroBatch
from mca_lib.trainers.training_args import TrainingArguments


class Experts:
    """The routers of this rank; a model without experts has none."""

    def __init__(self, chunks: Sequence[MegatronModule], args: TrainingArguments) -> None:
        self._config, self._args = chunks[0].config, args
        self._routers = [m for chunk in chunks for m in chunk.modules() if isinstance(m, RowRouter)]
        for router in self._routers:
            router.rows_per_micro_batch = args.per_device_train_batch_size
        self.loss_weight = torch.ones(1, device=torch.cuda.current_device())
        """Of the routers' sums over tokens in this step, before all gradients are divided by the tokens with loss."""

    def begin_step(self, batches: Sequence[MicroBatch]) -> None:
        """Weigh the routers' losses so that they are means over all tokens of the step that are no padding."""
        if not (self._args.moe_aux_loss_coeff or self._args.moe_z_loss_coeff):
            return
        counted = sum(batch.loss_mask_1S.sum() for batch in batches)
        tokens = sum((batch.rows_1S > 0).sum() for batch in batches)
        both = torch.stack((counted, tokens)).double()
        dist.all_reduce(both, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
        self.loss_weight = (both[:1] / both[1:].clamp(min=1)).float()

    @torch.no_grad()
    def measures(self) -> dict[str, float]:
        """Over the tokens since the last call, means over layers; empty without experts or tokens.

        `expert_load_imbalance` is the largest number of tokens of an expert over the mean; `moe_aux_loss` is without
        its coefficient. Both are 1 where the load is even. Collective over all ranks.
        """
        config = self._config
        if config.num_moe_experts is None:
            return {}
        layers = config.num_layers + (config.mtp_num_layers or 0)
        table = torch.zeros(layers, config.num_moe_experts + 1, dtype=torch.float64, device=self.loss_weight.device)
        for router in self._routers:
            layer = router.layer_number - 1 + (config.num_layers if router.is_mtp_layer else 0)
            table[layer] = torch.cat((router.tokens_E, router.aux_sum[None]))
            router.reset_counts()
        dist.all_reduce(table)  # every token is routed on one rank: where tensor parallel ranks train, they split rows
        table = table[table[:, :-1].sum(dim=1) > 0]
        if not len(table):
            return {}
        tokens_LE, aux_L = table[:, :-1], table[:, -1]
        measures = {"expert_load_imbalance": float((tokens_LE.amax(dim=1) / tokens_LE.mean(dim=1)).mean())}
        if self._args.moe_aux_loss_coeff:
            tokens_L = tokens_LE.sum(dim=1) / config.moe_router_topk
            measures["moe_aux_loss"] = float((aux_L / tokens_L).mean())
        return measures
