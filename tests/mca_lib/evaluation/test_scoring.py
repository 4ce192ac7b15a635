"""Held-out scores against a computation that does one document, one position at a time.

Shapes: D documents, S positions, V vocabulary.
"""

import math

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from mca_lib.errors import ModelError
from mca_lib.evaluation.scoring import Document, Scores, loss_difference, score
from mca_lib.tiny_models import make_tiny_model
from mca_lib.verification.tiny import make_tiny


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> torch.nn.Module:
    # Wide initial weights: losses differ much between tokens, so that a wrong label shows.
    folder = make_tiny_model(tmp_path_factory.mktemp("model"), num_hidden_layers=2, initializer_range=0.3)
    return AutoModelForCausalLM.from_pretrained(folder).eval()


@pytest.fixture(scope="module")
def documents() -> list[Document]:
    """Lengths from 2 to 40, loss in scattered runs, one document with loss on its last token only."""
    random = np.random.default_rng(0)
    made = []
    for length in (17, 2, 40, 5, 33, 9, 24):
        mask_S = random.random(length) < 0.5
        mask_S[0], mask_S[-1] = False, True
        made.append(Document(random.integers(3, 700, length), mask_S))
    last_only = np.zeros(12, dtype=bool)
    last_only[-1] = True
    return [*made, Document(random.integers(3, 700, 12), last_only)]


def _score(model, documents, batch_size=4) -> Scores:
    return score(model, documents, batch_size, lambda done: None)


def test_scores_equal_a_plain_computation(model, documents):
    scores = _score(model, documents)
    for d, document in enumerate(documents):
        with torch.no_grad():
            logits_SV = model(torch.from_numpy(document.tokens)[None]).logits[0].double()
        positions = [s for s in range(1, len(document.tokens)) if document.loss_mask[s]]
        losses = [-torch.log_softmax(logits_SV[s - 1], dim=0)[document.tokens[s]].item() for s in positions]
        # fp32 logits of size 10; the sum has up to 20 terms.
        assert scores.loss_D[d] == pytest.approx(sum(losses), rel=1e-5)
        assert scores.correct_D[d] == sum(logits_SV[s - 1].argmax().item() == document.tokens[s] for s in positions)
        assert scores.tokens_D[d] == len(positions)


def test_figures_are_means_over_all_tokens(model, documents):
    scores = _score(model, documents)
    assert scores.tokens == sum(int(document.loss_mask.sum()) for document in documents)
    assert scores.loss == pytest.approx(scores.loss_D.sum() / scores.tokens)
    assert scores.perplexity == pytest.approx(math.exp(scores.loss))
    assert 0 <= scores.accuracy <= 1


@pytest.mark.parametrize("batch_size", [1, 3, 100])
def test_scores_do_not_depend_on_the_batch_size(model, documents, batch_size):
    expected, scores = _score(model, documents), _score(model, documents, batch_size)
    # Matrix products of another shape round differently, padding changes nothing else.
    np.testing.assert_allclose(scores.loss_D, expected.loss_D, rtol=1e-5)
    np.testing.assert_array_equal(scores.correct_D, expected.correct_D)


def test_short_documents_do_not_get_the_long_rope_of_their_neighbours(tmp_path, documents):
    model = AutoModelForCausalLM.from_pretrained(make_tiny(tmp_path, "phi3"), dtype=torch.float32).eval()
    long = Document(np.tile(documents[0].tokens, 3), np.tile(documents[0].loss_mask, 3))
    alone, together = (_score(model, [*documents, long], batch_size) for batch_size in (1, 100))
    np.testing.assert_allclose(together.loss_D, alone.loss_D, rtol=1e-5)


def test_every_model_output_counts_as_correct_when_it_is_the_label(model, documents):
    """Label each position with the model's own choice: accuracy 1."""
    tokens_S = documents[2].tokens
    with torch.no_grad():
        choice_S = model(torch.from_numpy(tokens_S)[None]).logits[0].argmax(-1).numpy()
    mask_S = np.zeros(len(tokens_S), dtype=bool)
    mask_S[-1] = True
    followed = Document(np.concatenate([tokens_S[:-1], choice_S[-2:-1]]), mask_S)
    assert _score(model, [followed]).accuracy == 1.0


def test_progress_counts_documents(model, documents):
    seen = []
    score(model, documents, 3, seen.append)
    assert seen == [3, 6, 8]


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_loss_that_is_no_number_is_an_error(documents, tmp_path, value):
    model = AutoModelForCausalLM.from_pretrained(make_tiny_model(tmp_path, num_hidden_layers=1))
    with torch.no_grad():
        model.lm_head.weight[3, 0] = value
    with pytest.raises(ModelError, match=r"loss of held-out document 2 is .*lower training\.learning_rate"):
        _score(model, documents)


def test_perplexity_beyond_a_double_is_none():
    assert Scores(np.array([7100.0]), np.array([0]), np.array([10])).perplexity is None


def test_error_of_equal_documents_is_the_textbook_one():
    random = np.random.default_rng(1)
    tokens_D, base_D, new_D = np.full(30, 8), random.normal(20, 3, 30), random.normal(18, 3, 30)
    difference = loss_difference(_scores(new_D, tokens_D), _scores(base_D, tokens_D))
    per_document_D = (new_D - base_D) / 8
    assert difference.mean == pytest.approx(per_document_D.mean())
    assert difference.stderr == pytest.approx(per_document_D.std(ddof=1) / math.sqrt(30))


def test_error_agrees_with_resampling_whole_documents():
    random = np.random.default_rng(2)
    tokens_D = random.integers(5, 80, 200)
    base_D = tokens_D * random.normal(2.0, 0.4, 200)
    new_D = base_D - tokens_D * random.normal(0.3, 0.2, 200)
    difference = loss_difference(_scores(new_D, tokens_D), _scores(base_D, tokens_D))
    draws = random.integers(0, 200, (4000, 200))
    resampled = ((new_D - base_D)[draws].sum(axis=1) / tokens_D[draws].sum(axis=1)).std()
    # 4000 draws know the spread to about 1 %, and 200 documents leave a linearization error of a few percent.
    assert difference.stderr == pytest.approx(resampled, rel=0.08)


def test_one_document_has_no_error_estimate():
    difference = loss_difference(_scores([3.0], [2]), _scores([4.0], [2]))
    assert difference.mean == -0.5
    assert difference.stderr is None


def _scores(loss_D, tokens_D) -> Scores:
    return Scores(np.asarray(loss_D), np.zeros(len(tokens_D), dtype=np.int64), np.asarray(tokens_D))
