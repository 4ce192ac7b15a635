"""Training of hybrids: no layout changes loss or gradient, and a resumed run goes on as if it had not stopped.

The whole table of layouts is that of `tests/acceptance/hybrid_layouts.py`.
"""

import numpy as np
import pytest

from tests.mca_lib.trainers.hybrid_training import HYBRIDS, make_sources, run, run_packings

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
