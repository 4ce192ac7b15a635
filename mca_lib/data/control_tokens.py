"""Control tokens come from the template alone: `<|im_end|>` in a user's text stays the text that it is.

A template and the user's text meet in one string, which the tokenizer then splits at every control token it knows. So
before rendering, control tokens in user text are replaced by marks that no tokenizer knows, and when the string is
encoded, the pieces between the template's control tokens are encoded as plain text with the marks put back. Text
without any control token, that is nearly all, takes the tokenizer's ordinary path.

Control tokens are the added tokens that the tokenizer calls special. Others, such as `<think>` or `<tool_call>`, are
part of what a model reads and writes, and are not touched.
"""

import re
from collections.abc import Iterable
from typing import Any

from mca_lib.data.alignment import UnusableRow

# Unicode noncharacters, which never stand in a text that is interchanged.
_OPEN, _CLOSE = "\ufdd0", "\ufdd1"
# Some tool formats write their text as ASCII JSON.
_MARK = re.compile(r"(?:\ufdd0|\\ufdd0)(\d+)(?:\ufdd1|\\ufdd1)")


class GuardedTokenizer:
    """The part of a tokenizer that LLaMA-Factory's templates use, with marks understood."""

    def __init__(self, tokenizer: Any, spared: Iterable[str] = ()) -> None:
        """`spared` are special tokens that user text may contain, such as a template's words around a thought."""
        self._tokenizer = tokenizer
        special = {t.content: i for i, t in tokenizer.added_tokens_decoder.items() if t.special and t.content}
        self._special_ids = frozenset(special.values())
        # Longest first: one token may be the beginning of another.
        self._tokens = sorted(special, key=lambda token: (-len(token), token))
        self._any_special = _alternatives(self._tokens)
        self._to_mark = _alternatives([token for token in self._tokens if token not in set(spared)])
        self._index = {token: i for i, token in enumerate(self._tokens)}

    @property
    def bos_token_id(self) -> int | None:
        return self._tokenizer.bos_token_id

    @property
    def eos_token_id(self) -> int | None:
        return self._tokenizer.eos_token_id

    def convert_tokens_to_ids(self, token: str) -> int:
        return self._tokenizer.convert_tokens_to_ids(token)

    def mark(self, text: str) -> str:
        """User text with its control tokens replaced by marks."""
        if not self._to_mark.search(text):
            return text
        return self._to_mark.sub(lambda match: f"{_OPEN}{self._index[match[0]]}{_CLOSE}", text)

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """Ids of a rendered string that may hold marks."""
        if not _MARK.search(text):
            return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        ids: list[int] = []
        position = 0
        for match in self._any_special.finditer(text):
            ids += self.encode_plain(self._unmark(text[position : match.start()]))
            ids.append(self._tokenizer.convert_tokens_to_ids(match[0]))
            position = match.end()
        return ids + self.encode_plain(self._unmark(text[position:]))

    def encode_plain(self, text: str) -> list[int]:
        """Ids of a text in which nothing is a control token.

        Raises:
            UnusableRow: the tokenizer's model itself makes a control token of it, as some vocabularies do.
        """
        if not text:
            return []
        ids = self._tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)
        if not self._special_ids.isdisjoint(ids):
            raise UnusableRow("control token in the text")
        return ids

    def _unmark(self, text: str) -> str:
        def token(match: re.Match[str]) -> str:
            index = int(match[1])
            return self._tokens[index] if index < len(self._tokens) else match[0]

        return _MARK.sub(token, text)


def _alternatives(tokens: Iterable[str]) -> re.Pattern[str]:
    # With no token at all: a pattern that matches nowhere.
    return re.compile("|".join(map(re.escape, tokens)) or r"(?!)")
