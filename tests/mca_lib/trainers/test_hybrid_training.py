"""Training of hybrids: no layout changes loss or gradient, and a resumed run goes on as if it had not stopped.

The whole table of layouts is that of `tests/acceptance/hybrid_layouts.py`.
"""

import shutil

import numpy as np
import pytest

from tests.mca_lib.trainers.hybrid_training import HYBRIDS, make_sources, run, run_packings
from tests.mca_lib.trainers.training import weights

STEPS = 3
# fp32, relative; sums are taken in another order (2e-7 measured).
TOLERANCE = 2e-6


@pytest.fixture(scope="module")
def folder(ranks, tmp_path_factory):
    folder = tmp_path_factory.mktemp("hybrids")
    ranks(1, make_sources, folder)
    return folder


@pytest.fixture(scope="module")
def alone(ranks, folder):
    return {model: run(ranks, folder, model, "one rank", max_steps=STEPS) for model in HYBRIDS}


@pytest.mark.parametrize(
    ("model", "layout"),
    [("dense", "TP2 SP"), ("dense", "PP2 VPP2 by |"), ("dense", "CP2"), ("experts", "TP2 SP, EP2 ETP1")],
)
def test_losses_and_gradient_norms_equal_those_of_one_rank(ranks, folder, alone, model, layout):
    steps = run(ranks, folder, model, layout, max_steps=STEPS)
    np.testing.assert_allclose(steps, alone[model], rtol=TOLERANCE)


@pytest.mark.parametrize("layout", ["one rank", "CP2"])
def test_packed_documents_train_as_one_by_one(ranks, folder, layout):
    packed, single = run_packings(ranks, folder, "dense", layout, steps=2)
    np.testing.assert_allclose(packed, single, rtol=TOLERANCE)


@pytest.fixture(scope="module")
def whole(ranks, folder):
    """A training of four steps, with a checkpoint in the middle."""
    return run(ranks, folder, "dense", "TP2", out="whole", max_steps=4, save_steps=2, save_total_limit=9)


@pytest.mark.parametrize("layout", ["TP2", "PP2 VPP2 by |"])
def test_a_resumed_training_goes_on_as_if_it_had_not_stopped(ranks, folder, whole, layout):
    out = folder / f"resumed {layout}"
    shutil.copytree(folder / "whole" / "checkpoint-2", out / "checkpoint-2")
    resumed = run(ranks, folder, "dense", layout, out=out.name, max_steps=4, save_steps=2)
    assert len(resumed) == 2
    same_layout = layout == "TP2"
    np.testing.assert_allclose(resumed, whole[2:], rtol=0 if same_layout else TOLERANCE)
    for name, weight in weights(out / "final").items():
        # Other bits of a sum can be another last bit of a weight.
        np.testing.assert_allclose(weight, weights(folder / "whole" / "final")[name], atol=0 if same_layout else 1e-6)


def test_a_frozen_transformer_keeps_every_bit_while_its_mamba_layers_train(ranks, folder):
    no_rate = 1e-46  # in fp32 it is 0
    for out, options in {"start": {"learning_rate": no_rate}, "frozen": {"freeze": ["transformer"]}}.items():
        run(ranks, folder, "dense", "TP2 SP", out=out, max_steps=STEPS, **options)
    start, trained = weights(folder / "start" / "final"), weights(folder / "frozen" / "final")
    changed = {name for name, weight in trained.items() if not (weight == start[name]).all()}
    assert changed == {name for name in trained if ".mixer." in name}
