"""How well a model predicts the loss tokens of held-out documents.

Each document is scored alone, from its own first token on, whatever it was packed with for training. So the figures
depend neither on packing nor, beyond rounding, on the batch size.

Shapes: D documents, B documents of a batch, S positions, K positions that carry a label in some document, V vocabulary.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from mca_lib.data.token_store import IGNORE_INDEX
from mca_lib.errors import ModelError
from mca_lib.evaluation.images import Picture, image_arguments

# exp(700) is close to the largest double.
LARGEST_EXPONENT = 700.0


@dataclass(frozen=True)
class Document:
    """One conversation or text of the eval split."""

    tokens: np.ndarray
    """int64 [S]."""
    loss_mask: np.ndarray
    """bool [S]: this token is predicted with loss; False for the first one."""
    pictures: tuple[Picture, ...] = ()
    """Images that it shows, in the order of their tokens."""


@dataclass(frozen=True)
class Scores:
    """Sums per document, so that figures over any set of documents follow from them."""

    loss_D: np.ndarray
    """float64: sum of the negative log likelihoods, in nats."""
    correct_D: np.ndarray
    """int64: number of loss tokens that were the most likely one."""
    tokens_D: np.ndarray
    """int64: number of loss tokens."""

    def part(self, documents: slice) -> "Scores":
        """Those of some of the documents."""
        return Scores(self.loss_D[documents], self.correct_D[documents], self.tokens_D[documents])

    @property
    def tokens(self) -> int:
        return int(self.tokens_D.sum())

    @property
    def loss(self) -> float:
        """Mean over all loss tokens."""
        return float(self.loss_D.sum() / self.tokens)

    @property
    def perplexity(self) -> float | None:
        """exp(loss), or None where that exceeds a double."""
        return math.exp(self.loss) if self.loss < LARGEST_EXPONENT else None

    @property
    def accuracy(self) -> float:
        """Share of the loss tokens that were the most likely one."""
        return float(self.correct_D.sum() / self.tokens)


@dataclass(frozen=True)
class Difference:
    """Loss of one model minus the loss of another on the same documents."""

    mean: float
    stderr: float | None
    """Standard error over documents; None for a single one."""


def loss_difference(scores: Scores, baseline: Scores) -> Difference:
    """`scores` minus `baseline`, paired by document.

    The mean over tokens is a ratio of two sums over documents, and documents, not tokens, are independent draws: the
    error is the linearized one of a ratio, sqrt(D / (D - 1) * sum_D (difference_D - mean * tokens_D)^2) / tokens.
    """
    difference_D = scores.loss_D - baseline.loss_D
    mean = float(difference_D.sum() / scores.tokens)
    documents = len(difference_D)
    if documents < 2:
        return Difference(mean, None)
    residual_D = difference_D - mean * scores.tokens_D
    variance = documents / (documents - 1) * float((residual_D**2).sum())
    return Difference(mean, math.sqrt(variance) / scores.tokens)


def score(
    model: torch.nn.Module, documents: Sequence[Document], batch_size: int, on_scored: Callable[[int], None]
) -> Scores:
    """Score every document with a transformers causal language model; `on_scored` gets the number done so far.

    Raises:
        ModelError: a loss is NaN or infinite.
    """
    loss_D = np.zeros(len(documents))
    correct_D = np.zeros(len(documents), dtype=np.int64)
    done = 0
    for batch in _batches([len(document.tokens) for document in documents], batch_size, _short_length(model)):
        loss_D[batch], correct_D[batch] = _score_batch(model, [documents[d] for d in batch])
        for d in batch:
            if not math.isfinite(loss_D[d]):
                raise ModelError(
                    f"the loss of held-out document {d} is {loss_D[d]}: the model's weights or activations overflow; "
                    "if training diverged, lower training.learning_rate"
                )
        done += len(batch)
        on_scored(done)
    return Scores(loss_D, correct_D, np.array([int(d.loss_mask.sum()) for d in documents], dtype=np.int64))


def _batches(lengths_D: Sequence[int], size: int, short: int | None) -> Iterator[list[int]]:
    """Numbers of the documents of each batch; none has some of at most `short` tokens and some of more."""
    # Documents of similar length side by side: little padding.
    order = sorted(range(len(lengths_D)), key=lambda d: -lengths_D[d])
    for is_long in (True, False):
        group = [d for d in order if (short is None or lengths_D[d] > short) == is_long]
        yield from (group[start : start + size] for start in range(0, len(group), size))


def _short_length(model: torch.nn.Module) -> int | None:
    """Tokens up to which LongRoPE has its frequencies of short documents; None for any other rope.

    transformers gives a whole batch those of its longest document.
    """
    rope = getattr(model.config.get_text_config(), "rope_parameters", None) or {}
    return rope["original_max_position_embeddings"] if rope.get("rope_type") == "longrope" else None


@torch.inference_mode()
def _score_batch(model: torch.nn.Module, documents: Sequence[Document]) -> tuple[list[float], list[int]]:
    longest = max(len(document.tokens) for document in documents)
    input_ids_BS = torch.zeros(len(documents), longest, dtype=torch.long)
    attention_mask_BS = torch.zeros_like(input_ids_BS)
    labels_BS = torch.full_like(input_ids_BS, IGNORE_INDEX)
    for b, document in enumerate(documents):
        tokens_S = torch.from_numpy(np.asarray(document.tokens, dtype=np.int64))
        length = len(tokens_S)
        input_ids_BS[b, :length] = tokens_S
        attention_mask_BS[b, :length] = 1
        next_has_loss = torch.from_numpy(np.asarray(document.loss_mask[1:], dtype=bool))
        labels_BS[b, : length - 1] = torch.where(next_has_loss, tokens_S[1:], IGNORE_INDEX)
    # Logits are by far the largest tensor; prompts need none.
    kept_K = (labels_BS != IGNORE_INDEX).any(dim=0).nonzero().squeeze(1)
    device = next(model.parameters()).device
    pictures = [picture for document in documents for picture in document.pictures]
    logits_BKV = model(
        input_ids=input_ids_BS.to(device),
        **image_arguments(model, input_ids_BS.to(device), pictures),
        attention_mask=attention_mask_BS.to(device),
        logits_to_keep=kept_K.to(device),
        use_cache=False,
    ).logits
    sums = [_sums(logits_BKV[b], labels_BS[b, kept_K].to(device)) for b in range(len(documents))]
    return [loss for loss, _ in sums], [correct for _, correct in sums]


def _sums(logits_KV: torch.Tensor, labels_K: torch.Tensor) -> tuple[float, int]:
    """(sum of the losses in float64, number of labels that have the largest logit) of one document."""
    has_label_K = labels_K != IGNORE_INDEX
    labels_K, logits_KV = labels_K[has_label_K], logits_KV[has_label_K].float()
    loss_K = torch.nn.functional.cross_entropy(logits_KV, labels_K, reduction="none")
    return float(loss_K.double().sum()), int((logits_KV.argmax(dim=-1) == labels_K).sum())
