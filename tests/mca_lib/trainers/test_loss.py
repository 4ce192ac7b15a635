"""A token weighs the same in whichever micro batch, replica or pack it is: the division happens once."""

import pytest


def step_of_weighted_labels() -> tuple[float, float]:
    """(loss, gradient norm) of one step, where each token's loss is its label times the only weight, which is 1.

    The micro batches have sums 1 and 9 over 1 and 3 tokens: both on one rank, or one on each of two replicas.
    """
    import numpy as np
    import torch
    import torch.distributed as dist
    from megatron.core.enums import ModelType
    from megatron.core.transformer import MegatronModule, TransformerConfig

    from mca_lib.data.token_store import Row
    from mca_lib.parallel import initialize_model_parallel
    from mca_lib.trainers import Seq2SeqTrainingArguments
    from mca_lib.trainers.batches import Alignment, collate
    from mca_lib.trainers.engine import Engine
    from mca_lib.trainers.loss import TokenObjective

    class WeightedLabels(MegatronModule):
        adapters, model_type = None, ModelType.encoder_or_decoder

        def __init__(self) -> None:
            super().__init__(TransformerConfig(num_layers=1, hidden_size=4, num_attention_heads=1))
            self.weight = torch.nn.Parameter(torch.ones(()))

        def set_input_tensor(self, tensor: object) -> None:
            pass

        def forward(self, ids_1S, positions_1S, mask, labels, loss_mask, packed_seq_params, padding_mask):
            return labels * self.weight

    args = Seq2SeqTrainingArguments(output_dir="unused", max_grad_norm=0.0)
    initialize_model_parallel(args)
    engine = Engine([WeightedLabels()], args, 1, TokenObjective())
    batches = []
    for values in [[1], [3, 3, 3]][dist.get_rank() :: dist.get_world_size()]:
        size = len(values)
        row = Row(*(np.array(v) for v in (values, values, range(size), [size], [0])))
        batches.append(collate([row], size, Alignment(1, 1), torch.device("cpu"), 0, 1))
    metrics = engine.train_step(batches)
    return metrics.loss, metrics.grad_norm


@pytest.mark.parametrize("world_size", [1, 2])
def test_two_micro_batches_with_sums_1_and_9_over_1_and_3_tokens_give_2_5(ranks, world_size):
    assert ranks(world_size, step_of_weighted_labels) == [(2.5, 2.5)] * world_size
