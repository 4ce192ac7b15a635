"""Initial weights of Mamba layers: the published distributions, by seed, at any layout."""

import pytest
import torch
import torch.nn.functional as F

from mca_lib.converter.plan import entries
from mca_lib.models.config import HybridLayers, Mamba2, McaModelConfig
from mca_lib.models.hybrid.fresh import fill_fresh, fresh_tensors

MAMBA = Mamba2(num_heads=64, head_dim=8, state_size=16, num_groups=2)


@pytest.fixture(scope="module")
def config() -> McaModelConfig:
    transformer = McaModelConfig(
        "llama",
        num_layers=2,
        hidden_size=64,
        ffn_hidden_size=96,
        num_attention_heads=4,
        num_query_groups=2,
        kv_channels=16,
        vocab_size=100,
        max_position_embeddings=64,
        initializer_range=0.03,
    )
    return transformer.with_hybrid(HybridLayers("M*-M*-", MAMBA))


def test_every_weight_of_a_mamba_layer_is_drawn_once_in_the_shape_of_the_table(config):
    table = {e.mca: e.mapping.hf_shapes(config)[0] for e in entries(config) if ".mixer." in e.mca}
    drawn = [pair for layer in config.mamba_layers for pair in fresh_tensors(config, layer, seed=0)]
    assert {name: tuple(tensor.shape) for name, tensor in drawn} == table
    assert len(drawn) == len(table)


def test_the_distributions_are_those_of_mamba_2(config):
    layer = {name.partition(".mixer.")[2]: tensor for name, tensor in fresh_tensors(config, 0, seed=1)}
    decay, step = layer["A_log"].exp(), F.softplus(layer["dt_bias"])
    assert 1 <= decay.min() < 3
    assert 12 < decay.max() <= 16
    assert 0.999e-3 <= step.min() < 3e-3
    assert 3e-2 < step.max() <= 0.1001
    for name in ("D", "norm.weight", "in_proj.layer_norm_weight"):
        assert torch.equal(layer[name], torch.ones_like(layer[name]))
    for name in ("conv1d.weight", "conv1d.bias"):
        assert 0.45 < layer[name].abs().max() <= 0.5  # 1 / sqrt(4)
    # Tens of thousands of draws: the standard deviation is off by less than 2 %.
    assert layer["in_proj.weight"].std().item() == pytest.approx(0.03, rel=0.02)
    assert layer["out_proj.weight"].std().item() == pytest.approx(0.03 / 6**0.5, rel=0.02)


def test_a_layer_depends_on_seed_and_number_alone(config):
    first, again = dict(fresh_tensors(config, 0, seed=5)), dict(fresh_tensors(config, 0, seed=5))
    assert all(torch.equal(again[name], tensor) for name, tensor in first.items())
    other_seed, other_layer = dict(fresh_tensors(config, 0, seed=6)), dict(fresh_tensors(config, 3, seed=5))
    for kind in ("in_proj.weight", "A_log", "conv1d.weight"):
        name = f"decoder.layers.0.mixer.{kind}"
        assert not torch.equal(first[name], other_seed[name])
        assert not torch.equal(first[name], other_layer[name.replace("layers.0", "layers.3")])


def test_zero_output_changes_the_output_projection_alone(config):
    plain, silent = dict(fresh_tensors(config, 3, 0)), dict(fresh_tensors(config, 3, 0, "zero_output"))
    changed = [name for name, tensor in plain.items() if not torch.equal(tensor, silent[name])]
    assert changed == ["decoder.layers.3.mixer.out_proj.weight"]
    assert not silent[changed[0]].any()


def test_two_tensor_parallel_ranks_hold_the_halves_of_every_part(config):
    whole = dict(fresh_tensors(config, 0, 0))
    table = {e.mca: e.mapping for e in entries(config) if e.mca in whole}
    shares = []
    for rank in range(2):
        held = {name: torch.full(row.local_shape(config, rank, 2), torch.nan) for name, row in table.items()}
        assert fill_fresh(held.items(), config, 0, "random", rank, 2) == list(held)
        shares.append(held)
    name = "decoder.layers.0.mixer.in_proj.weight"
    sizes = (512, 512, 32, 32, 64)  # z x B C dt
    halves = [share[name].split([size // 2 for size in sizes]) for share in shares]
    assert torch.equal(torch.cat([part for pair in zip(*halves, strict=True) for part in pair]), whole[name])
    norm = "decoder.layers.0.mixer.in_proj.layer_norm_weight"
    assert torch.equal(shares[0][norm], shares[1][norm])


def test_a_layer_that_is_none_is_refused(config):
    with pytest.raises(ValueError, match="layer 1 of 'M\\*-M\\*-' is no Mamba layer"):
        next(fresh_tensors(config, 1, 0))
