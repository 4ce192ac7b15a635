"""Proof that a converted model is the model that it was converted from, and the card that tells it.

layouts.py    the parallel layouts that are tried
tiny.py       a tiny model of every family, with every feature of its table on
sample.py     the tokens: chats by the model's own template, and plain text
measure.py    what ranks do: load, run, compare with transformers, write back and compare byte by byte
verify.py     one model at all layouts → `Card`
card.py       the card: data, limits, markdown
families.py   the cards of all families, `python -m mca_lib.verification docs/models`
"""
