"""`preview.md`: what a person looks at before training: what was kept and why not, and which tokens carry loss."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from mca_lib.data.token_store import TokenStore

DOCUMENTS = 5
PAIRS = 3
MAX_TOKENS = 1500
"""Of one document; the rest is left out, and said so."""
LEARNED = {False: "predict", True: "prefer, of the two answers of each pair, the chosen one:"}
OPEN, CLOSE = "⟦", "⟧"

type Decode = Callable[[Sequence[int]], str]


def render_preview(stats: Mapping[str, Any], store: TokenStore, decode: Decode, *, pairs: bool = False) -> str:
    """The page, in Markdown. `decode` turns token ids into text, control tokens included.

    Of pairs the documents are the chosen and the rejected in turns.
    """
    shown = min(2 * PAIRS if pairs else DOCUMENTS, store.num_documents)
    parts = ["# Data set", _splits_table(stats["splits"]), _rows_table(stats["rows"]), _bad_rows(stats["named_rows"])]
    parts += [
        "## Documents",
        f"The first {shown} of the training split. The model learns to {LEARNED[pairs]} what stands between {OPEN} and "
        f"{CLOSE}; the rest is context.",
    ]
    for index in range(shown):
        tokens, mask = store.document(index)
        name = f"Pair {index // 2 + 1}, {('chosen', 'rejected')[index % 2]}" if pairs else f"Document {index + 1}"
        parts.append(f"### {name}: {len(tokens)} tokens, {int(mask.sum())} with loss")
        parts.append(_fenced(render_document(tokens[:MAX_TOKENS], mask[:MAX_TOKENS], decode)))
        if len(tokens) > MAX_TOKENS:
            parts.append(f"… {len(tokens) - MAX_TOKENS} more tokens")
    return "\n\n".join(part for part in parts if part) + "\n"


def render_document(tokens: np.ndarray, mask: np.ndarray, decode: Decode) -> str:
    """The text with spans that carry loss between ⟦ and ⟧; such brackets in the text itself get a backslash."""
    borders = np.flatnonzero(np.diff(mask)) + 1
    starts = [0, *borders.tolist()]
    ends = [*borders.tolist(), len(tokens)]
    pieces = []
    for start, end in zip(starts, ends, strict=True):
        text = re.sub(f"([{OPEN}{CLOSE}])", r"\\\1", decode(tokens[start:end].tolist()))
        pieces.append(f"{OPEN}{text}{CLOSE}" if mask[start] else text)
    return "".join(pieces)


def _fenced(text: str) -> str:
    """A code block; its fence is longer than any run of backticks in the text, so nothing in it is markup."""
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}text\n{text}\n{fence}"


def _splits_table(splits: Mapping[str, Mapping[str, Any]]) -> str:
    lines = [
        "| split | rows | documents | tokens | with loss | fill | document length: median / 90 % / longest |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for name, s in splits.items():
        lengths = s["document_length"]
        lines.append(
            f"| {name} | {s['rows']:,} | {s['documents']:,} | {s['tokens']:,} | {s['loss_tokens']:,} "
            f"| {s['fill']:.2%} | {lengths['median']} / {lengths['p90']} / {lengths['max']} |"
        )
    return "\n".join(lines)


def _rows_table(rows: Mapping[str, Any]) -> str:
    lines = ["| rows | |", "| --- | ---: |", f"| read | {rows['read']:,} |"]
    lines += [f"| unusable: {_escaped(reason)} | {n:,} |" for reason, n in rows["bad"].items()]
    if rows["not_drawn"]:
        lines.append(f"| not drawn (`max_rows`) | {rows['not_drawn']:,} |")
    lines += [f"| dropped: {_escaped(reason)} | {n:,} |" for reason, n in rows["dropped"].items()]
    lines += [f"| kept | {rows['kept']:,} |", f"| of these truncated | {rows['truncated']:,} |"]
    return "\n".join(lines)


def _bad_rows(named: Sequence[str]) -> str:
    if not named:
        return ""
    return "## Rows left out\n\n" + "\n".join(f"- {_escaped(row)}" for row in named)


def _escaped(text: str) -> str:
    return re.sub(r"([\\`*_{}\[\]<>|#])", r"\\\1", text)
