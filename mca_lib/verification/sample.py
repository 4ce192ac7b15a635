"""The tokens that a verification runs on: equal rows, without padding, and which of them carry loss.

With a chat template, a row begins with a conversation, rendered by it, whose answers carry loss, and goes on with
plain text. Without one, or without a tokenizer, the second half of each row stands for the loss tokens.

B rows, S tokens of a row.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mca_lib.converter.sample_text import TEXT
from mca_lib.errors import ConfigError, ModelError
from mca_lib.models.vision.images import Grid
from mca_lib.tokenizer import load_tokenizer

ROWS, LENGTH = 4, 120
"""120 divides by 2 × each of 1 to 6 context parallel ranks."""

CHATS = (
    ("Where did the merchants of Visby come from?", "From Lübeck and Novgorod; they met at the harbour."),
    ("What is 252 / 84?", "252 / 84 = 3."),
    ("Write a function that doubles a number.", "def double(x: float) -> float:\n    return 2 * x"),
    ("How long should the dough rise?", "12 hours at 18 °C, folded twice."),
)

PROMPTS = (
    "What is the capital of France?",
    "Write one sentence about herring.",
    "Count from one to ten.",
    "Explain in simple words why the sky is blue.",
    "def moving_average(values, width):",
)


@dataclass(frozen=True)
class Sample:
    """Rows of one length."""

    ids_BS: list[list[int]]
    loss_BS: list[list[bool]]
    """The logits at this position predict a token that carries loss."""
    loss_tokens: str
    """What the loss tokens are."""
    grids: tuple[tuple[Grid, ...], ...] = ()
    """Images of each row; empty for a model of text."""

    @property
    def tokens(self) -> int:
        return sum(map(len, self.ids_BS))


def make_sample(directory: Path, vocab_size: int, max_positions: int) -> Sample:
    """Raises ModelError when the tokenizer gives ids that the model does not have."""
    length = min(LENGTH, max_positions // 12 * 12)
    if not length:
        raise ModelError(f"{directory}: a model of {max_positions} positions is too short to be verified")
    if not has_tokenizer(directory):
        ids_BS = [[(7919 * (i + row * length) + 13) % vocab_size for i in range(length)] for row in range(ROWS)]
        return Sample(ids_BS, _second_half(length), "the second half of each row (the directory has no tokenizer)")
    tokenizer = load_tokenizer(directory)
    text = tokenizer(TEXT, add_special_tokens=False)["input_ids"]
    text *= -(-(ROWS * length) // len(text))
    if not getattr(tokenizer, "chat_template", None):
        ids_BS = [text[row * length : (row + 1) * length] for row in range(ROWS)]
        sample = Sample(
            ids_BS, _second_half(length), "the second half of each row (the tokenizer has no chat template)"
        )
    else:
        chats = [_chat(tokenizer, *chat) for chat in CHATS]
        rows = [(ids + text[i * length :])[:length] for i, (ids, _) in enumerate(chats)]
        loss_BS = [_predicting((mask + [False] * length)[:length]) for _, mask in chats]
        sample = Sample(rows, loss_BS, "the answers of chats that the tokenizer's template renders")
        if not any(map(any, loss_BS)):
            sample = Sample(rows, _second_half(length), "the second half of each row (the answers lie beyond its end)")
    if (highest := max(map(max, sample.ids_BS))) >= vocab_size:
        raise ModelError(f"{directory}: the tokenizer gives id {highest}, the vocabulary ends at {vocab_size - 1}")
    return sample


def prompts(directory: Path) -> list[list[int]]:
    """Token ids of `PROMPTS`, by the chat template where there is one."""
    tokenizer = load_tokenizer(directory)
    if not getattr(tokenizer, "chat_template", None):
        return [tokenizer(prompt)["input_ids"] for prompt in PROMPTS]
    return [
        _ids(tokenizer.apply_chat_template([{"role": "user", "content": p}], add_generation_prompt=True))
        for p in PROMPTS
    ]


def has_tokenizer(directory: Path) -> bool:
    return any(directory.glob("tokenizer*"))


def require_tokenizer(directory: Path) -> None:
    """Raises ConfigError: a directory without a tokenizer has no prompts."""
    if not has_tokenizer(directory):
        raise ConfigError(f"{directory}: no tokenizer, so there is nothing to generate from")


def _chat(tokenizer: Any, question: str, answer: str) -> tuple[list[int], list[bool]]:
    """Token ids of a conversation, and which belong to the answer: what follows the prompt."""
    asked = [{"role": "user", "content": question}]
    prompt = _ids(tokenizer.apply_chat_template(asked, add_generation_prompt=True))
    whole = _ids(tokenizer.apply_chat_template([*asked, {"role": "assistant", "content": answer}]))
    common = next((i for i, (a, b) in enumerate(zip(prompt, whole, strict=False)) if a != b), len(prompt))
    return whole, [i >= common for i in range(len(whole))]


def _ids(rendered: Any) -> list[int]:
    """transformers 5 returns an encoding, transformers 4 a list."""
    return list(rendered if isinstance(rendered, list) else rendered["input_ids"])


def _predicting(mask_S: list[bool]) -> list[bool]:
    return [*mask_S[1:], False]


def _second_half(length: int) -> list[list[bool]]:
    return [[i >= length // 2 for i in range(length)]] * ROWS
