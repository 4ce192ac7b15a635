"""Preference losses: from the log-probabilities of a chosen and a rejected answer to a loss per pair.

An answer's *score* is log p(answer | prompt), summed over its scored tokens or, for some losses, their mean. Its
*gain* is its score minus the score that the reference model gives it, or its score where there is no reference.

    loss      score   reference   loss of a pair; m = gain of chosen - gain of rejected
    sigmoid   sum     yes         -(1 - s) log σ(β m) - s log σ(-β m), s: label smoothing
                                  Rafailov et al. 2023, "Direct Preference Optimization", eq. 7; with s > 0 cDPO
    hinge     sum     yes         max(0, 1 - β m)                     Zhao et al. 2023, "SLiC-HF"; in this form Liu et
                                  al. 2024, "Statistical Rejection Sampling Improves Preference Optimization"
    ipo       mean    yes         (m - 1 / 2β)²                       Azar et al. 2023, "A General Theoretical Paradigm
                                  …", eq. 17. The paper's scores are sums; means follow its authors' advice, as in TRL
                                  (`DPOTrainer`, loss_type="ipo") and LLaMA-Factory
    simpo     mean    no          -log σ(β m - γ)                     Meng et al. 2024, "SimPO", eq. 6
    orpo      mean    no          -chosen - β log σ(log odds(chosen) - log odds(rejected)), odds(x) = eˣ / (1 - eˣ)
                                  Hong et al. 2024, "ORPO", eq. 6 and 7, β their λ

`pref_ftx` adds that weight times -log p(chosen) per scored token of the pair's chosen answer. So it has the pair's own
token count, and the sum of both terms is counted in pairs: a pair weighs the same in both, whatever its length.
LLaMA-Factory defines it so too.

P: pairs. Everything is float64: a few numbers per pair, which were summed over many tokens.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F

from mca_lib.errors import ConfigError

LOSSES = ("sigmoid", "hinge", "ipo", "orpo", "simpo")
WITHOUT_REFERENCE = ("orpo", "simpo")
SCORED_BY_MEAN = ("ipo", "orpo", "simpo")
LARGEST_LOG_PROBABILITY = -1e-7
"""An answer that is certain up to the rounding of fp32 has finite odds."""


@dataclass(frozen=True)
class PreferenceArguments:
    """Which loss. Names are LLaMA-Factory's. Raises ConfigError for values that contradict each other."""

    pref_loss: str = "sigmoid"
    pref_beta: float = 0.1
    dpo_label_smoothing: float = 0.0
    """Probability that a pair is labelled the wrong way round; loss `sigmoid` only."""
    simpo_gamma: float = 0.5
    """Margin by which the rewards of a pair are to differ; loss `simpo` only."""
    pref_ftx: float = 0.0
    """Weight of the supervised term on the chosen answers."""

    def __post_init__(self) -> None:
        if self.pref_loss not in LOSSES:
            raise ConfigError(f"pref_loss={self.pref_loss!r}: use one of {', '.join(LOSSES)}")
        if not (self.pref_beta > 0 and math.isfinite(self.pref_beta)):
            raise ConfigError(f"pref_beta={self.pref_beta}: use a positive number")
        if not 0 <= self.dpo_label_smoothing < 0.5:
            raise ConfigError(f"dpo_label_smoothing={self.dpo_label_smoothing}: use a number from 0 to less than 0.5")
        if self.dpo_label_smoothing and self.pref_loss != "sigmoid":
            raise ConfigError(f"dpo_label_smoothing goes with pref_loss='sigmoid', not {self.pref_loss!r}")
        if not (self.pref_ftx >= 0 and math.isfinite(self.pref_ftx)):
            raise ConfigError(f"pref_ftx={self.pref_ftx}: use a number from 0")

    @property
    def needs_reference(self) -> bool:
        return self.pref_loss not in WITHOUT_REFERENCE


class Answers(NamedTuple):
    """One side of P pairs."""

    logps_P: torch.Tensor
    """Log-probability of the answer: the sum over its scored tokens."""
    tokens_P: torch.Tensor
    """Scored tokens: those of the answer with its end, no prompt and no padding."""
    reference_P: torch.Tensor
    """`logps_P` by the reference model; 0 without one."""


class PairLosses(NamedTuple):
    """What a loss says of P pairs. All but the loss are without gradient."""

    loss_P: torch.Tensor
    chosen_rewards_P: torch.Tensor
    """β · gain."""
    rejected_rewards_P: torch.Tensor
    chosen_scores_P: torch.Tensor
    rejected_scores_P: torch.Tensor


def preference_losses(args: PreferenceArguments, chosen: Answers, rejected: Answers) -> PairLosses:
    """The loss of each pair. An answer without any scored token has log-probability 0, as a sum and as a mean."""
    (chosen_P, chosen_gain_P), (rejected_P, rejected_gain_P) = (_score(args, side) for side in (chosen, rejected))
    loss_P = _LOSSES[args.pref_loss](args, chosen_gain_P, rejected_gain_P)
    if args.pref_ftx:
        loss_P = loss_P - args.pref_ftx * _mean(chosen.logps_P, chosen.tokens_P)
    return PairLosses(
        loss_P,
        args.pref_beta * chosen_gain_P.detach(),
        args.pref_beta * rejected_gain_P.detach(),
        chosen_P.detach(),
        rejected_P.detach(),
    )


def _score(args: PreferenceArguments, side: Answers) -> tuple[torch.Tensor, torch.Tensor]:
    """(score, gain) of each answer."""
    score_P, reference_P = side.logps_P, side.reference_P
    if args.pref_loss in SCORED_BY_MEAN:
        score_P, reference_P = _mean(score_P, side.tokens_P), _mean(reference_P, side.tokens_P)
    return score_P, score_P - reference_P if args.needs_reference else score_P


def _mean(sum_P: torch.Tensor, tokens_P: torch.Tensor) -> torch.Tensor:
    return sum_P / tokens_P.clamp(min=1)


def _sigmoid(args: PreferenceArguments, chosen_P: torch.Tensor, rejected_P: torch.Tensor) -> torch.Tensor:
    logits_P, smoothing = args.pref_beta * (chosen_P - rejected_P), args.dpo_label_smoothing
    return -(1 - smoothing) * F.logsigmoid(logits_P) - smoothing * F.logsigmoid(-logits_P)


def _hinge(args: PreferenceArguments, chosen_P: torch.Tensor, rejected_P: torch.Tensor) -> torch.Tensor:
    return F.relu(1 - args.pref_beta * (chosen_P - rejected_P))


def _ipo(args: PreferenceArguments, chosen_P: torch.Tensor, rejected_P: torch.Tensor) -> torch.Tensor:
    return (chosen_P - rejected_P - 1 / (2 * args.pref_beta)) ** 2


def _simpo(args: PreferenceArguments, chosen_P: torch.Tensor, rejected_P: torch.Tensor) -> torch.Tensor:
    return -F.logsigmoid(args.pref_beta * (chosen_P - rejected_P) - args.simpo_gamma)


def _orpo(args: PreferenceArguments, chosen_P: torch.Tensor, rejected_P: torch.Tensor) -> torch.Tensor:
    return -chosen_P - args.pref_beta * F.logsigmoid(_log_odds(chosen_P) - _log_odds(rejected_P))


def _log_odds(logp_P: torch.Tensor) -> torch.Tensor:
    """log(p / (1 - p)) of a log-probability ≤ 0, finite as p goes to 1.

    1 - p as -expm1(log p): the difference 1 - exp(log p) would be 0 long before p is 1.
    """
    logp_P = logp_P.clamp(max=LARGEST_LOG_PROBABILITY)
    return logp_P - torch.log(-torch.expm1(logp_P))


_LOSSES: dict[str, Callable[[PreferenceArguments, torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "sigmoid": _sigmoid,
    "hinge": _hinge,
    "ipo": _ipo,
    "orpo": _orpo,
    "simpo": _simpo,
}
