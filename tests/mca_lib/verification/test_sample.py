"""The tokens of a verification: equal rows, and loss on what a chat model answers."""

from pathlib import Path

import pytest

from mca_lib.errors import ModelError
from mca_lib.tiny_models import make_tokenizer
from mca_lib.verification.sample import CHATS, LENGTH, ROWS, make_sample, prompts


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    make_tokenizer().save_pretrained(tmp_path)
    return tmp_path


def test_the_answers_of_chats_carry_loss(directory: Path) -> None:
    sample, tokenizer = make_sample(directory, 1027, 256), make_tokenizer()
    for ids, loss, (question, answer) in zip(sample.ids_BS, sample.loss_BS, CHATS, strict=True):
        assert len(ids) == len(loss) == LENGTH
        assert question in tokenizer.decode(ids)
        # A position carries loss when the token after it does.
        learned = tokenizer.decode([ids[i + 1] for i, flag in enumerate(loss) if flag])
        assert learned.rstrip() == f"{answer}<|im_end|>"


def test_without_a_template_the_second_half_stands_for_it(directory: Path) -> None:
    (directory / "chat_template.jinja").unlink()
    sample = make_sample(directory, 1027, 256)
    assert "no chat template" in sample.loss_tokens
    assert all(loss == [i >= LENGTH // 2 for i in range(LENGTH)] for loss in sample.loss_BS)
    assert all(ids for ids in prompts(directory))


def test_rows_are_no_longer_than_the_model(directory: Path) -> None:
    sample = make_sample(directory, 1027, 50)
    assert [len(ids) for ids in sample.ids_BS] == [48] * ROWS


def test_a_tokenizer_beyond_the_vocabulary_is_refused(directory: Path) -> None:
    with pytest.raises(ModelError, match="the vocabulary ends at 99"):
        make_sample(directory, 100, 256)


def test_prompts_end_where_the_answer_begins(directory: Path) -> None:
    tokenizer = make_tokenizer()
    assert all(tokenizer.decode(ids).endswith("<|im_start|>assistant\n") for ids in prompts(directory))
