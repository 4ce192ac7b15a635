"""How often held-out pairs are ranked as the data set ranks them.

likelier          share of pairs whose chosen answer is more probable than the rejected one, by one model alone
reward margin     log p(chosen) - log p(rejected) of the trained model, minus the same of the base model: the implicit
                  reward of preference optimization (Rafailov et al. 2023, section 4) with β = 1; mean over pairs
reward accuracy   share of pairs whose reward margin is positive

Log-probabilities are sums over the tokens of an answer. P: pairs.
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from mca_lib.evaluation.scoring import Scores


def pair_figures(scores: Mapping[str, Scores]) -> dict[str, Any]:
    """Figures of documents that are chosen and rejected answers in turns; rewards of the last model by the first."""
    margins_P = {name: s.loss_D[1::2] - s.loss_D[::2] for name, s in scores.items()}
    base_P, trained_P = next(iter(margins_P.values())), list(margins_P.values())[-1]
    rewards_P = trained_P - base_P
    pairs = len(rewards_P)
    return {
        "pairs": pairs,
        "likelier": {name: float(np.mean(m_P > 0)) for name, m_P in margins_P.items()},
        "reward_accuracy": float(np.mean(rewards_P > 0)),
        "reward_margin": float(rewards_P.mean()),
        "reward_margin_stderr": float(rewards_P.std(ddof=1) / math.sqrt(pairs)) if pairs > 1 else None,
    }
