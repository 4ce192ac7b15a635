"""What an adapter begins with, and what it sees of a layer that has its norm inside."""


def check_initial_matrix() -> None:
    import math

    import torch

    from mca_lib.adapters.lora import initial_A

    A_RI = initial_A("model.layers.0.mlp.up_proj", 64, 400, seed=1)
    theirs_RI = torch.nn.init.kaiming_uniform_(torch.empty(64, 400), a=math.sqrt(5))
    assert A_RI.abs().max() <= 400**-0.5
    assert theirs_RI.abs().max() <= 400**-0.5
    assert abs(A_RI.std() / theirs_RI.std() - 1) < 0.02
    assert torch.equal(A_RI, initial_A("model.layers.0.mlp.up_proj", 64, 400, seed=1))
    assert not torch.equal(A_RI, initial_A("model.layers.1.mlp.up_proj", 64, 400, seed=1))
    assert not torch.equal(A_RI, initial_A("model.layers.0.mlp.up_proj", 64, 400, seed=2))


def check_norm_inside() -> None:
    from types import SimpleNamespace

    import torch

    from mca_lib.adapters.lora import _normalized
    from mca_lib.models.norm import RMSNorm

    x = torch.randn(3, 2, 16)
    for centered in (False, True):
        config = SimpleNamespace(
            params_dtype=torch.float32, sequence_parallel=False, layernorm_zero_centered_gamma=centered
        )
        norm = RMSNorm(config, 16, 1e-5)
        with torch.no_grad():
            norm.weight.uniform_(0.5, 1.5)
        fused = SimpleNamespace(layer_norm_weight=norm.weight, eps=1e-5, zero_centered_gamma=centered)
        torch.testing.assert_close(_normalized(fused, x), norm(x))
    assert _normalized(SimpleNamespace(), x) is x


def test_the_initial_matrix_is_as_pefts_and_follows_from_seed_and_name(ranks):
    ranks(1, check_initial_matrix)


def test_a_layer_with_its_norm_inside_is_adapted_behind_the_norm(ranks):
    """Transformer Engine's fused layer; a stand-in, since it has no CPU version."""
    ranks(1, check_norm_inside)
