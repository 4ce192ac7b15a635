"""Numbers that a name decides are the same in every version: caches hold what was drawn with them."""

import hashlib

import torch

from mca_lib.named_random import named_generator


def test_the_seed_is_the_digest_of_the_parts():
    seed = int.from_bytes(hashlib.sha256(b"3 decoder.layers.0.mixer.A_log").digest()[:7])
    expected = torch.randn(4, generator=torch.Generator().manual_seed(seed))
    assert torch.randn(4, generator=named_generator(3, "decoder.layers.0.mixer.A_log")).equal(expected)
    assert not torch.randn(4, generator=named_generator(4, "decoder.layers.0.mixer.A_log")).equal(expected)
