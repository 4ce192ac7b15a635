"""Packing and masking: a token weighs the same wherever it is, and what carries no loss counts nowhere."""

import numpy as np
import pytest

from mca_lib.data.token_store import Row
from mca_lib.parallel import DistributingParallelArguments
from tests.mca_lib.trainers.training import VOCAB, make_model


def make_row(*lengths: int, seed: int = 0, masked: bool = False) -> Row:
    """Documents of these lengths; every second token has loss."""
    random = np.random.default_rng(seed)
    ids = random.integers(0, VOCAB, sum(lengths))
    labels = np.where(np.arange(sum(lengths)) % 2, random.integers(0, VOCAB, sum(lengths)), -100)
    ends = np.cumsum(lengths)
    labels[ends - 1] = -100
    positions = np.concatenate([np.arange(n) for n in lengths])
    return Row(
        ids, np.full_like(labels, -100) if masked else labels, positions, np.array(lengths), np.arange(len(lengths))
    )


def sums(model: str, micro_batches: list[list[Row]], layout: dict[str, int]) -> list[tuple[float, int]]:
    """(loss sum, tokens with loss) of each micro batch, over all context parallel ranks."""
    import torch
    import torch.distributed as dist
    from megatron.core import parallel_state

    from mca_lib.models import AutoModel
    from mca_lib.parallel import initialize_model_parallel
    from mca_lib.trainers.batches import Alignment, collate
    from mca_lib.trainers.loss import token_loss

    args = DistributingParallelArguments(**layout)
    initialize_model_parallel(args)
    chunk = AutoModel.from_pretrained(model, args)[0].eval()
    alignment, found = Alignment.of(args), []
    for rows in micro_batches:
        batch = collate(
            rows,
            alignment.length(rows),
            alignment,
            torch.device("cpu"),
            parallel_state.get_context_parallel_rank(),
            parallel_state.get_context_parallel_world_size(),
        )
        with torch.no_grad():
            losses = chunk(
                batch.input_ids_1S, batch.position_ids_1S, None, labels=batch.labels_1S, packed_seq_params=batch.packed
            )
        loss = token_loss(losses, batch.loss_mask_1S)
        total = torch.stack([loss.loss_sum, loss.count.float()])
        dist.all_reduce(total, group=parallel_state.get_context_parallel_group())
        found.append((total[0].item(), int(total[1])))
    return found


@pytest.fixture(scope="module")
def model(ranks, tmp_path_factory) -> str:
    return str(ranks(1, make_model, tmp_path_factory.mktemp("model") / "hf")[0])


A, B = make_row(7, 12, seed=1), make_row(9, seed=2)
CONTEXTS = pytest.mark.parametrize(
    ("world_size", "layout"), [(1, {}), (2, {"context_parallel_size": 2})], ids=["CP1", "CP2"]
)


@CONTEXTS
def test_the_loss_of_a_pack_is_the_sum_of_its_documents_losses(ranks, model, world_size, layout):
    packed = Row(
        np.concatenate([A.input_ids, B.input_ids]),
        np.concatenate([A.labels, B.labels]),
        np.concatenate([A.position_ids, B.position_ids]),
        np.concatenate([A.document_lengths, B.document_lengths]),
        np.arange(3),
    )
    batches = [[A], [B], [packed], [A, B]]
    a, b, pack, together = ranks(world_size, sums, model, batches, layout)[0]
    assert pack[1] == together[1] == a[1] + b[1]
    assert pack[0] == pytest.approx(a[0] + b[0], abs=1e-4)
    assert together[0] == pytest.approx(pack[0], abs=1e-4)


@CONTEXTS
def test_a_document_does_not_see_the_one_before_it(ranks, model, world_size, layout):
    """Not a bit of its loss changes with the other's tokens."""
    other_first = Row(A.input_ids.copy(), A.labels.copy(), A.position_ids, A.document_lengths, A.documents)
    other_first.input_ids[:7] = (other_first.input_ids[:7] + 1) % VOCAB
    for row in (first := Row(*vars(A).values()), other_first):
        row.labels[:7] = -100
    one, two = ranks(world_size, sums, model, [[first], [other_first]], layout)[0]
    assert one == two


def test_rows_without_loss_and_empty_places_add_no_token(ranks, model):
    alone, with_masked, empty = ranks(1, sums, model, [[B], [B, make_row(11, seed=4, masked=True)], []], {})[0]
    assert with_masked[1] == alone[1]
    assert with_masked[0] == pytest.approx(alone[0], abs=1e-4)
    assert empty == (0.0, 0)
