"""Epoch accounting: every row once per epoch, whatever the batch size and however the rows are dealt."""

import pytest

from mca_lib.errors import ConfigError, DataError
from mca_lib.trainers.schedule import BatchShape, Schedule


@pytest.mark.parametrize(("rows", "batch"), [(8, 4), (10, 4), (3, 4), (1, 1), (17, 5)])
def test_each_epoch_holds_every_row_exactly_once(rows, batch):
    schedule = Schedule(rows, batch, seed=1, num_train_epochs=3)
    steps = [schedule.rows(step) for step in range(schedule.total_steps)]
    per_epoch = schedule.steps_per_epoch
    for epoch in range(3):
        seen = [row for step in steps[epoch * per_epoch : (epoch + 1) * per_epoch] for row in step]
        assert sorted(seen) == list(range(rows))
    assert len(steps) == 3 * per_epoch
    assert sorted(schedule.trained_rows) == list(range(rows))


def test_epochs_differ_and_seeds_differ_but_a_rerun_does_not():
    def order(seed: int, epoch: int) -> list[int]:
        return Schedule(50, 50, seed, num_train_epochs=2).rows(epoch)

    assert order(1, 0) == order(1, 0)
    assert len({tuple(order(1, 0)), tuple(order(1, 1)), tuple(order(2, 0))}) == 3


def test_a_step_is_found_without_the_steps_before_it():
    forward, direct = Schedule(23, 4, seed=3, num_train_epochs=3), Schedule(23, 4, seed=3, num_train_epochs=3)
    steps = [forward.rows(step) for step in range(forward.total_steps)]
    assert direct.rows(14) == steps[14]
    assert Schedule(23, 4, seed=3, max_steps=2).trained_rows.tolist() == steps[0] + steps[1]


@pytest.mark.parametrize(
    ("epochs", "max_steps", "total"),
    [(1.0, -1, 3), (2.0, -1, 6), (0.5, -1, 2), (0.01, -1, 1), (1.0, 7, 7), (0.1 * 10, -1, 3)],
)
def test_the_run_ends_where_epochs_or_max_steps_say(epochs, max_steps, total):
    assert Schedule(10, 4, seed=0, num_train_epochs=epochs, max_steps=max_steps).total_steps == total


def test_a_tenth_of_thirty_steps_is_three():
    assert Schedule(30, 1, seed=0, num_train_epochs=0.1).total_steps == 3


def test_epoch_counts_rows_not_steps():
    schedule = Schedule(10, 4, seed=0, num_train_epochs=2)
    assert [schedule.epoch_at(step) for step in range(5)] == [0.0, 0.4, 0.8, 1.0, 1.4]


@pytest.mark.parametrize("replicas", [1, 2, 4])
@pytest.mark.parametrize("micro", [1, 2])
@pytest.mark.parametrize("rows", [8, 5, 1])
def test_dealing_neither_drops_nor_doubles_rows(replicas, micro, rows):
    shape = BatchShape(8, micro, replicas)
    dealt = [shape.deal(range(rows), rank) for rank in range(replicas)]
    assert {len(micro_batches) for micro_batches in dealt} == {shape.micro_batches(rows)}, "every replica has as many"
    places = [place for micro_batches in dealt for places in micro_batches for place in places]
    assert sorted(place for place in places if place is not None) == list(range(rows))


def test_a_short_step_has_fewer_micro_batches():
    assert BatchShape(8, 1, 2).deal([4, 7, 9], rank=1) == [[7], [None]]


def test_interleaved_pipelines_get_a_multiple_of_their_stages():
    assert len(BatchShape(8, 1, 1, micro_batch_multiple=2).deal([1, 2, 3], rank=0)) == 4


def test_a_global_batch_that_cannot_be_split_names_both_sides():
    with pytest.raises(ConfigError, match=r"global_batch_size=6 .* micro_batch_size=2 × data parallel size 2"):
        BatchShape(6, 2, 2)


def test_an_empty_split_is_refused():
    with pytest.raises(DataError, match="no rows"):
        Schedule(0, 4, seed=0)
