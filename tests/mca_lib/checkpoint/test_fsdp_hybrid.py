"""A hybrid under Megatron-FSDP starts from a transformer's checkpoint; each mend of Megatron is still needed."""

import numpy as np
import pytest

from tests.mca_lib.checkpoint import fsdp_ranks
from tests.mca_lib.tiny_models import save_hf

PATTERN = "*-*-*-*-"


@pytest.fixture(scope="module")
def written(ranks, tmp_path_factory):
    """(model, checkpoint of its training under Megatron-FSDP on two ranks, how the training went on)."""
    directory = tmp_path_factory.mktemp("fsdp")
    ranks(1, save_hf, directory / "hf", "llama", "bfloat16")
    (history, _) = ranks(2, fsdp_ranks.run, "write", {}, directory / "hf", directory / "checkpoint")
    return directory / "hf", directory / "checkpoint", history


def test_a_gather_ahead_is_done_when_its_call_returns(ranks):
    """Else ranks die by chance: see `fsdp_ranks.one_by_one`."""
    assert ranks(2, fsdp_ranks.run, "gathered", {}, 1 << 22) == [True, True]


def load(ranks, written, **options):
    return ranks(2, fsdp_ranks.run, "go_on_under_fsdp", options, *written[:2])[0]


def test_a_hybrid_goes_on_as_the_transformer_would_have(ranks, written):
    found = load(ranks, written, pattern=PATTERN)
    assert (found["step"], found["adam"], found["rates"]) == (3, [3, 3], [1e-3, 1e-3])
    # The same sums in the same order, but for those of the gradient norm.
    assert found["history"] == pytest.approx(np.array(written[2]), rel=1e-6)


def test_fresh_layers_keep_their_initialization(ranks, written):
    found = load(ranks, written, pattern="M*-*-M*-*-", mamba_head_dim=8, mamba_state_size=8)
    assert found["fresh"]
    assert all(found["fresh"])
    assert (found["adam"], found["rates"]) == ([3, 3], [1e-3, 1e-3])
    assert found["history"][1] != found["history"][0]


def test_megatron_still_loses_what_a_checkpoint_says_of_parameter_groups(ranks, written):
    """When this fails, Megatron carries it back: remove `_carried_back`."""
    found = load(ranks, written, pattern=PATTERN, leave_out="groups")
    assert (found["adam"], found["rates"]) == ([1, 1], [0.0, 0.0])


def test_megatron_still_computes_with_the_weights_of_before_the_load(ranks, written):
    """When this fails, Megatron brings them up to date: remove the call of `install_optimized_model_weights`."""
    found = load(ranks, written, pattern=PATTERN, leave_out="weights")
    assert found["history"][0][0] != pytest.approx(written[2][0][0], rel=1e-2)
