"""Typed mappings: what they split, fuse and pad, and that nothing is lost on the way back."""

import dataclasses

import pytest
import torch

from mca_lib.converter.mapping import Mapping
from mca_lib.converter.mappings import QKV, GatedQKV, Packed, Replicated, padded_vocab_size
from mca_lib.models.registry import FAMILIES, config_from_hf
from tests.mca_lib.models.test_registry import BASE

CONFIG = dataclasses.replace(
    config_from_hf({**BASE, "model_type": "qwen3", "architectures": None, "attention_bias": True}),
    vocab_size=101,
    num_attention_heads=8,
    kv_channels=4,
)
ROWS = {m.mca: m for m in FAMILIES["qwen3"].mappings(CONFIG)}


def sources(mapping: Mapping) -> list[torch.Tensor]:
    """Tensors in which every element is different."""
    shapes, start, found = mapping.hf_shapes(CONFIG), 0.0, []
    for shape in shapes:
        count = int(torch.tensor(shape).prod())
        found.append(torch.arange(start, start + count).reshape(shape))
        start += count
    return found


@pytest.mark.parametrize("name", ROWS)
def test_there_and_back_is_the_same_bytes(name: str) -> None:
    parts = sources(ROWS[name])
    back = ROWS[name].to_hf(ROWS[name].to_mca(parts, CONFIG), CONFIG)
    assert all(torch.equal(a, b) for a, b in zip(parts, back, strict=True))


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", ROWS)
def test_shares_of_the_ranks_hold_every_element_once(name: str, size: int) -> None:
    mapping = ROWS[name]
    parts = sources(mapping)
    shares = [mapping.to_mca(parts, CONFIG, rank, size) for rank in range(size)]
    assert [tuple(s.shape) for s in shares] == [mapping.local_shape(CONFIG, r, size) for r in range(size)]
    if isinstance(mapping, Replicated):
        shares = shares[:1]
    held = torch.cat([s.flatten() for s in shares]).sort().values
    everything = torch.cat([p.flatten() for p in parts]).sort().values
    if "embedding" in name or "output_layer" in name:
        padding = (padded_vocab_size(101, size) - 101) * CONFIG.hidden_size
        assert not held[:padding].any()
        held = held[padding:]
    assert torch.equal(held, everything)


def test_query_heads_are_interleaved_with_their_key_and_value() -> None:
    config = dataclasses.replace(CONFIG, num_attention_heads=4, num_query_groups=2, kv_channels=2)
    mapping = QKV("fused", ("q", "k", "v"), columns=())
    q, k, v = (torch.tensor(heads).repeat_interleave(2) for heads in ([10, 11, 12, 13], [20, 21], [30, 31]))

    def heads(*place: int) -> list[int]:
        """The number that both channels of a head hold, in the order of the fused rows."""
        return mapping.to_mca([q, k, v], config, *place)[::2].tolist()

    assert heads() == [10, 11, 20, 30, 12, 13, 21, 31]
    assert heads(1, 2) == [12, 13, 21, 31]
    assert heads(1, 4) == [20, 30]  # inside a group


def test_query_heads_come_before_their_gates_in_a_group() -> None:
    config = dataclasses.replace(CONFIG, num_attention_heads=4, num_query_groups=2, kv_channels=2)
    mapping = GatedQKV("fused", ("q", "k", "v"), columns=())
    heads_of_q = [10, 50, 11, 51, 12, 52, 13, 53]  # each with its gate
    q, k, v = (torch.tensor(heads).repeat_interleave(2) for heads in (heads_of_q, [20, 21], [30, 31]))

    def heads(*place: int) -> list[int]:
        return mapping.to_mca([q, k, v], config, *place)[::2].tolist()

    assert heads() == [10, 11, 50, 51, 20, 30, 12, 13, 52, 53, 21, 31]
    assert heads(1, 2) == [12, 13, 52, 53, 21, 31]
    assert heads(1, 4) == [51, 20, 30]  # inside a group
    assert torch.equal(mapping.to_hf(mapping.to_mca([q, k, v], config), config)[0], q)


def test_parts_of_a_packed_tensor_may_take_turns_in_groups_and_lie_in_several_tensors() -> None:
    parts = (("a", 4), ("b", 2), ("c", 2))
    mapping = Packed("fused", ("ab", "c"), parts, (), hf_parts=(2, 1), groups=2)
    ab, c = torch.tensor([10, 11, 20, 12, 13, 21]), torch.tensor([30, 31])
    assert mapping.hf_shapes(CONFIG) == ((6,), (2,))
    whole = mapping.to_mca([ab, c], CONFIG)
    assert whole.tolist() == [10, 11, 12, 13, 20, 21, 30, 31]
    assert mapping.to_mca([ab, c], CONFIG, 1, 2).tolist() == [12, 13, 21, 31]
    assert mapping.part(".b").to_mca([ab, c], CONFIG).tolist() == [20, 21]
    assert [suffix for suffix, _ in mapping.stored_parts(CONFIG)] == [".a", ".b", ".c"]
    assert all(torch.equal(a, b) for a, b in zip(mapping.to_hf(whole, CONFIG), (ab, c), strict=True))


def test_each_half_of_a_gated_mlp_is_split_on_its_own() -> None:
    mapping = ROWS["decoder.layers.{layer}.mlp.linear_fc1.weight"]
    gate, up = sources(mapping)
    half = CONFIG.ffn_hidden_size // 2
    assert torch.equal(mapping.to_mca([gate, up], CONFIG, 1, 2), torch.cat([gate[half:], up[half:]]))


def test_row_parallel_weight_is_split_by_input() -> None:
    mapping = ROWS["decoder.layers.{layer}.mlp.linear_fc2.weight"]
    (weight,) = sources(mapping)
    assert torch.equal(mapping.to_mca([weight], CONFIG, 0, 2), weight[:, : weight.shape[1] // 2])


def test_rank_whose_share_is_all_padding_gets_zeros() -> None:
    config = dataclasses.replace(CONFIG, vocab_size=9)
    mapping = ROWS["embedding.word_embeddings.weight"]
    weight = torch.ones(9, CONFIG.hidden_size, dtype=torch.bfloat16)
    share = mapping.to_mca([weight], config, 7, 8)
    assert share.shape == (2, CONFIG.hidden_size)
    assert share.dtype == torch.bfloat16
    assert not share.any()


def test_only_the_slices_that_a_rank_owns_are_read() -> None:
    class Recorder:
        def __init__(self, tensor: torch.Tensor) -> None:
            self.tensor, self.read, self.dtype = tensor, 0, tensor.dtype

        def __getitem__(self, index: object) -> torch.Tensor:
            value = self.tensor[index]
            self.read += value.numel()
            return value

    for mapping in ROWS.values():
        parts = [Recorder(p) for p in sources(mapping)]
        share = mapping.to_mca(parts, CONFIG, 0, 2)
        assert sum(p.read for p in parts) == share.numel()


def test_length_that_does_not_divide_is_refused() -> None:
    with pytest.raises(ValueError, match="96 does not divide by 5"):
        list(ROWS["decoder.layers.{layer}.mlp.linear_fc1.weight"].segments(CONFIG, 0, 5))
