"""The preview shows the loss where it is, whatever the text contains."""

import re

import numpy as np

from mca_lib.data.preview import render_document
from tests.mca_lib.data.conftest import alpaca_rows


def preview(build, rows, **fields):
    return (build(rows, packing=False, **fields).output / "preview.md").read_text(encoding="utf-8")


def test_answers_stand_between_brackets_and_prompts_do_not(build):
    text = preview(build, [{"instruction": "Ask me", "output": "Told you"}])
    assert "<|im_start|>user\nAsk me<|im_end|>\n<|im_start|>assistant\n⟦Told you<|im_end|>\n⟧" in text


def test_text_cannot_break_out_of_its_block(build):
    nasty = "```\n# heading ⟦fake⟧ ````` **bold**"
    text = preview(build, [{"instruction": nasty, "output": nasty}])
    (fence,) = set(re.findall(r"^(`{3,})(?:text)?$", text, flags=re.MULTILINE)) - {"```"}
    assert fence == "``````"
    assert "\\⟦fake\\⟧" in text
    assert text.count("⟦") - text.count("\\⟦") == 2  # the legend's and the answer's


def test_loss_may_alternate():
    tokens, mask = np.arange(6), np.array([False, True, True, False, False, True])
    assert render_document(tokens, mask, lambda ids: "".join(map(str, ids))) == "0⟦12⟧34⟦5⟧"


def test_a_long_document_is_shortened_and_says_so(build):
    text = preview(build, [{"instruction": "Q", "output": "word " * 3000}], cutoff_len=4096)
    assert re.search(r"… \d+ more tokens", text)


def test_counts_are_shown(build):
    text = preview(build, [*alpaca_rows(9), {"instruction": "x", "output": ""}], max_bad_fraction=0.5)
    assert "| read | 10 |" in text
    assert "| unusable: empty output | 1 |" in text
    assert "| kept | 9 |" in text
    assert "| train | 9 | 9 |" in text
