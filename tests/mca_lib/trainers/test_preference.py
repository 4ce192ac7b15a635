"""Preference losses at known points: values, gradients, and where naive formulas break."""

import math

import pytest
import torch

from mca_lib.errors import ConfigError
from mca_lib.trainers.preference import Answers, PreferenceArguments, preference_losses


def losses(chosen, rejected, *, tokens=(1, 1), reference=(0.0, 0.0), **args):
    """One pair: (losses, gradient of the loss by the chosen and by the rejected log-probability)."""
    logps = [torch.tensor([value], dtype=torch.float64, requires_grad=True) for value in (chosen, rejected)]
    sides = [
        Answers(logp, torch.tensor([count]), torch.tensor([ref], dtype=torch.float64))
        for logp, count, ref in zip(logps, tokens, reference, strict=True)
    ]
    found = preference_losses(PreferenceArguments(**args), *sides)
    found.loss_P.sum().backward()
    return found, logps[0].grad.item(), logps[1].grad.item()


@pytest.mark.parametrize(
    ("name", "loss", "gradient"), [("sigmoid", 0.437488, -0.035434), ("hinge", 0.4, -0.1), ("ipo", 1.0, 2.0)]
)
def test_at_margin_6_and_beta_a_tenth(name, loss, gradient):
    found, by_chosen, by_rejected = losses(-10.0, -15.0, reference=(-13.0, -12.0), pref_loss=name, pref_beta=0.1)
    assert found.loss_P.item() == pytest.approx(loss, abs=5e-7)
    assert by_chosen == pytest.approx(gradient, abs=5e-7)
    assert by_rejected == -by_chosen
    assert found.chosen_rewards_P.item() == pytest.approx(0.3)
    assert found.rejected_rewards_P.item() == pytest.approx(-0.3)


@pytest.mark.parametrize(("name", "loss"), [("sigmoid", math.log(2)), ("hinge", 1.0), ("ipo", 25.0)])
def test_a_policy_that_equals_its_reference_has_the_loss_of_margin_0(name, loss):
    found, *_ = losses(-10.0, -15.0, reference=(-10.0, -15.0), pref_loss=name)
    assert found.loss_P.item() == pytest.approx(loss, rel=1e-15)


def test_smoothing_mixes_the_loss_of_the_pair_with_that_of_its_reverse():
    forward, *_ = losses(-1.0, -7.0)
    backward, *_ = losses(-7.0, -1.0)
    smooth, *_ = losses(-1.0, -7.0, dpo_label_smoothing=0.2)
    assert smooth.loss_P.item() == pytest.approx(0.8 * forward.loss_P.item() + 0.2 * backward.loss_P.item())


@pytest.mark.parametrize("name", ["ipo", "simpo", "orpo"])
def test_losses_by_mean_do_not_change_when_answers_are_repeated(name):
    once, by_chosen, _ = losses(-2.0, -9.0, tokens=(2, 3), reference=(-3.0, -4.0), pref_loss=name)
    twice, by_chosen_twice, _ = losses(-4.0, -18.0, tokens=(4, 6), reference=(-6.0, -8.0), pref_loss=name)
    assert twice.loss_P.item() == pytest.approx(once.loss_P.item())
    assert by_chosen_twice == pytest.approx(by_chosen / 2)
    assert once.chosen_scores_P.item() == -1.0


def test_simpo_by_hand():
    found, *_ = losses(-2.0, -9.0, tokens=(2, 3), reference=(-50.0, 0.0), pref_loss="simpo", pref_beta=2.0)
    assert found.loss_P.item() == pytest.approx(math.log1p(math.exp(-(2.0 * 2.0 - 0.5))))


def test_orpo_by_hand():
    found, *_ = losses(-2.0, -9.0, tokens=(2, 3), pref_loss="orpo", pref_beta=0.3)
    odds = [math.exp(x) / (1 - math.exp(x)) for x in (-1.0, -3.0)]
    expected = 1.0 + 0.3 * math.log1p(odds[1] / odds[0])
    assert found.loss_P.item() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("chosen", [-1e-3, -1e-12, 0.0, 1e-8], ids=str)
@pytest.mark.parametrize("rejected", [-1e-9, 0.0, -800.0], ids=str)
def test_orpo_stays_finite_where_an_answer_is_certain_or_impossible(chosen, rejected):
    """`log1p(-exp(x))` is infinite at x = 0, and its gradient not a number."""
    found, *gradients = losses(chosen, rejected, pref_loss="orpo")
    assert all(map(math.isfinite, [found.loss_P.item(), *gradients]))


@pytest.mark.parametrize("name", ["sigmoid", "hinge", "ipo", "simpo", "orpo"])
def test_an_answer_without_scored_tokens_is_certain_and_finite(name):
    found, *gradients = losses(0.0, -3.0, tokens=(0, 2), pref_loss=name, pref_ftx=0.5)
    assert all(map(math.isfinite, [found.loss_P.item(), *gradients]))
    assert found.chosen_scores_P.item() == 0.0


def test_the_supervised_term_is_the_mean_over_the_chosen_answers_own_tokens():
    plain, by_chosen, by_rejected = losses(-6.0, -9.0, tokens=(4, 3))
    more, by_chosen_more, by_rejected_more = losses(-6.0, -9.0, tokens=(4, 3), pref_ftx=0.5)
    assert more.loss_P.item() - plain.loss_P.item() == pytest.approx(0.5 * 6.0 / 4)
    assert by_chosen_more - by_chosen == pytest.approx(-0.5 / 4)
    assert by_rejected_more == by_rejected


def test_equal_to_trl_and_llamafactory(monkeypatch):
    """Their own methods on the same log-probabilities; both live in the environment for the data side."""
    from types import SimpleNamespace

    # Read on import; see mca_lib/data/llamafactory.py.
    monkeypatch.setenv("DISABLE_VERSION_CHECK", "1")
    from llamafactory.train.dpo.trainer import CustomDPOTrainer

    torch.manual_seed(0)
    logps = -20 * torch.rand(4, 6, dtype=torch.float64)
    tokens = torch.randint(1, 9, (2, 6))
    for name in ("sigmoid", "hinge", "ipo", "simpo", "orpo"):
        # `dpo_loss` is TRL's, inherited.
        theirs = object.__new__(CustomDPOTrainer)
        vars(theirs).update(
            {
                "beta": 0.3,
                "label_smoothing": 0.1 if name == "sigmoid" else 0.0,
                "simpo_gamma": 0.7,
                "loss_type": name,
                "reference_free": False,
                "f_divergence_type": "reverse_kl",
                "accelerator": SimpleNamespace(device="cpu"),
                "finetuning_args": SimpleNamespace(use_ref_model=name not in ("simpo", "orpo")),
                "bco_gemma": 0.0,
                "args": SimpleNamespace(),
            }
        )
        by_mean = name in ("ipo", "simpo", "orpo")
        scores = logps / tokens.repeat(2, 1) if by_mean else logps
        if theirs.finetuning_args.use_ref_model:
            their_loss_P, chosen_P, rejected_P = theirs.dpo_loss(*scores, loss_type=name, model_output={})
        else:
            their_loss_P, chosen_P, rejected_P = theirs.compute_preference_loss(scores[0], scores[1], None, None)
        args = PreferenceArguments(name, 0.3, theirs.label_smoothing, 0.7)
        sides = (Answers(logps[i], tokens[i], logps[2 + i]) for i in (0, 1))
        ours = preference_losses(args, *sides)
        for mine, other in ((ours.loss_P, their_loss_P), (ours.chosen_rewards_P, chosen_P)):
            torch.testing.assert_close(mine, other)
        torch.testing.assert_close(ours.rejected_rewards_P, rejected_P)


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"pref_loss": "sigmiod"}, "pref_loss='sigmiod': use one of sigmoid, hinge"),
        ({"pref_loss": "kto_pair"}, "pref_loss='kto_pair'"),
        ({"pref_beta": 0.0}, "pref_beta=0"),
        ({"pref_beta": math.inf}, "pref_beta=inf"),
        ({"dpo_label_smoothing": 0.5}, "dpo_label_smoothing=0.5"),
        ({"dpo_label_smoothing": 0.1, "pref_loss": "ipo"}, "goes with pref_loss='sigmoid', not 'ipo'"),
        ({"pref_ftx": -1.0}, "pref_ftx=-1"),
    ],
)
def test_a_wrong_argument_is_named(values, named):
    with pytest.raises(ConfigError, match=named):
        PreferenceArguments(**values)
