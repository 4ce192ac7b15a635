"""Floating point operations by formula are those that torch counts while the model runs."""

from typing import Any

import numpy as np
import pytest

from mca_lib.adapters.targets import adapter_elements
from mca_lib.models import flops
from mca_lib.models.freeze import frozen_weights
from mca_lib.models.registry import config_from_hf
from tests.mca_lib.models.hybrid.configs import hybrid_config
from tests.mca_lib.models.test_registry import BASE, BASES
from tests.mca_lib.tiny_models import VARIANTS, hf_config

COUNTED = ["llama-mlp-bias", "llama-tied", "mistral-full", "qwen3", "mixtral", "qwen3-moe-mixed", "qwen2-moe"]
COUNTED += [name for name in VARIANTS if VARIANTS[name]["model_type"] == "deepseek_v3"]


def counted(variant: str, batch: int, length: int) -> tuple[int, int]:
    """Operations of a forward and of a backward pass of Megatron's model, as torch's dispatcher sees them."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    from mca_lib.models import AutoModel
    from mca_lib.parallel import DistributingParallelArguments, initialize_model_parallel

    initialize_model_parallel(DistributingParallelArguments())
    models = AutoModel.from_config(config_from_hf(hf_config(variant).to_dict()))
    (model,) = models.eval()
    ids = torch.arange(batch * length).view(batch, length) % 99
    # The mathematical kernel is made of matrix products, all of them counted, over the whole square of scores.
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        with FlopCounterMode(display=False) as forward:
            logits = model(ids, torch.arange(length).expand(batch, length))
        with FlopCounterMode(display=False) as backward:
            logits.sum().backward()
    return forward.get_total_flops(), backward.get_total_flops()


@pytest.mark.parametrize("variant", COUNTED)
def test_formula_counts_what_torch_counts(ranks: Any, variant: str) -> None:
    batch, length = 2, 12
    config = config_from_hf(hf_config(variant).to_dict())
    ((forward, backward),) = ranks(1, counted, variant, batch, length)
    whole_square = length * length * config.num_layers
    attention = flops.attention_flops_per_pair(config) * whole_square * batch
    expected = 2 * flops.matrix_elements(config) * batch * length + attention
    assert forward == expected
    assert backward == 2 * expected


def test_mamba_layers_count_what_torch_counts_of_the_recurrence() -> None:
    """Token by token: each head's state takes an outer product and is read; the convolution is torch's own."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    config, tokens = hybrid_config("dense"), 3
    mamba = config.hybrid.mamba
    channels = mamba.inner_size + 2 * mamba.group_size
    with FlopCounterMode(display=False) as counter:
        for _ in range(tokens):
            x_HP1 = torch.ones(mamba.num_heads, mamba.head_dim, 1)
            state_HPN = x_HP1 @ torch.ones(mamba.num_heads, 1, mamba.state_size)
            state_HPN @ torch.ones(mamba.num_heads, mamba.state_size, 1)
        taps = torch.ones(channels, 1, mamba.conv_kernel)
        torch.nn.functional.conv1d(torch.ones(1, channels, tokens + mamba.conv_kernel - 1), taps, groups=channels)
    assert len(config.mamba_layers) * counter.get_total_flops() == tokens * flops.mamba_flops_per_token(config)


def test_gated_delta_nets_count_what_torch_counts_of_the_recurrence() -> None:
    """Token by token: each head's state is read under the key, takes an outer product, is read under the query."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    config, tokens = config_from_hf(hf_config("qwen3.5").to_dict()), 3
    net = config.gated_delta_net
    channels, heads = 2 * net.key_size + net.value_size, net.num_value_heads
    with FlopCounterMode(display=False) as counter:
        for _ in range(tokens):
            state_HVK = torch.ones(heads, net.value_head_dim, 1) @ torch.ones(heads, 1, net.key_head_dim)
            for _ in range(2):
                state_HVK @ torch.ones(heads, net.key_head_dim, 1)
        taps = torch.ones(channels, 1, net.conv_kernel)
        torch.nn.functional.conv1d(torch.ones(1, channels, tokens + net.conv_kernel - 1), taps, groups=channels)
    per_layer = flops.delta_net_flops_per_token(config) // 3
    assert counter.get_total_flops() == tokens * per_layer
    products = 2 * (flops.matrix_elements(config) + per_layer * 3 // 2)
    assert flops.forward_flops(config, 1, 1) == products + flops.attention_flops_per_pair(config)  # one layer has pairs


def test_a_hybrid_counts_its_transformer_and_its_mamba_layers() -> None:
    hybrid = hybrid_config("dense")
    mamba, lengths = hybrid.hybrid.mamba, np.array([5, 8])
    projections = 32 * (2 * mamba.inner_size + 2 * mamba.group_size + mamba.num_heads) + 32 * mamba.inner_size
    more = 3 * 13 * (2 * 2 * projections + flops.mamba_flops_per_token(hybrid))
    assert flops.step_flops(hybrid, lengths) == flops.step_flops(hybrid.transformer, lengths) + more
    assert flops.training_flops(hybrid, 10, 5) == flops.step_flops(hybrid, np.array([5, 5]))


def test_attention_counts_the_pairs_that_a_query_sees() -> None:
    config = config_from_hf({**BASES["qwen2"], "use_sliding_window": True, "sliding_window": 3, "max_window_layers": 4})
    full, windowed = 1 + 2 + 3 + 4 + 5, 1 + 2 + 3 + 3 + 3
    assert flops.attention_pairs(config, 5) == 4 * full + 2 * windowed
    assert flops.attention_pairs(config, 2) == 6 * 3  # the window does not bite
    assert flops.attention_pairs(config_from_hf(BASE), 5) == 6 * full


def test_training_step_is_three_forward_passes_over_all_tokens() -> None:
    config = config_from_hf(BASE)
    assert flops.training_flops(config, 40, 10) == 3 * 4 * flops.forward_flops(config, 10, 10)


def test_a_step_counts_each_document_by_its_own_length() -> None:
    window = {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 4}
    for config in (config_from_hf(BASE), config_from_hf({**BASES["qwen2"], **window})):
        lengths = [7, 2, 2, 16]
        each = sum(flops.training_flops(config, length, length) for length in lengths)
        assert flops.step_flops(config, np.array(lengths)) == each < flops.training_flops(config, 27, 27)


def counted_with_adapters(variant: str, length: int) -> int:
    """Operations of a forward and a backward pass with adapters everywhere."""
    import torch
    from peft import LoraConfig
    from torch.utils.flop_counter import FlopCounterMode

    from mca_lib.adapters import apply_megatron_lora
    from mca_lib.models import AutoModel
    from mca_lib.parallel import DistributingParallelArguments, initialize_model_parallel

    initialize_model_parallel(DistributingParallelArguments())
    models = AutoModel.from_config(config_from_hf(hf_config(variant).to_dict()))
    apply_megatron_lora(models, LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"), 0)
    (model,) = models
    ids = torch.arange(length)[None] % 99
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(ids, torch.arange(length)[None]).sum().backward()
    return counter.get_total_flops()


def test_with_adapters_frozen_matrices_have_no_gradient(ranks: Any) -> None:
    variant, length = "llama-tied", 12
    config = config_from_hf(hf_config(variant).to_dict())
    (total,) = ranks(1, counted_with_adapters, variant, length)
    adapters = adapter_elements(config, ["all-linear"], 4)
    expected = flops.step_flops(config, np.array([length]), adapters)
    seen, whole_square = flops.attention_pairs(config, length), length * length * config.num_layers
    expected += 3 * flops.attention_flops_per_pair(config) * (whole_square - seen)
    # Adapters of one fused layer are one product with a block-diagonal matrix, whose zeros the model does not need.
    fused = 2 * config.kv_channels * (config.num_attention_heads + 2 * config.num_query_groups)
    zeros = config.num_layers * 4 * (fused + 2 * config.ffn_hidden_size)
    assert total == expected + 3 * 2 * length * zeros


def counted_with_freeze(variant: str, length: int, freeze: list[str]) -> int:
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    from mca_lib.models import AutoModel
    from mca_lib.models.freeze import freeze_weights
    from mca_lib.parallel import DistributingParallelArguments, initialize_model_parallel

    initialize_model_parallel(DistributingParallelArguments())
    (model,) = models = AutoModel.from_config(config_from_hf(hf_config(variant).to_dict()))
    freeze_weights(list(models), freeze)
    ids = torch.arange(length)[None] % 99
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(ids, torch.arange(length)[None]).sum().backward()
    return counter.get_total_flops()


@pytest.mark.parametrize("freeze", [["layers.0"], ["embed_tokens", "mlp"]], ids=str)
def test_frozen_matrices_have_no_gradient(ranks: Any, freeze: list[str]) -> None:
    variant, length = "llama-tied", 12
    config = config_from_hf(hf_config(variant).to_dict())
    (total,) = ranks(1, counted_with_freeze, variant, length, freeze)
    frozen = flops.frozen_elements(config, frozen_weights(config, freeze))
    seen, whole_square = flops.attention_pairs(config, length), length * length * config.num_layers
    attention = 3 * flops.attention_flops_per_pair(config) * (whole_square - seen)
    assert total == flops.step_flops(config, np.array([length]), frozen=frozen) + attention


@pytest.mark.parametrize("variant", ["llama", "qwen2-moe", "deepseek-mtp"])
def test_all_layers_frozen_leave_the_output_layer(variant: str) -> None:
    config = config_from_hf(hf_config(variant).to_dict())
    frozen = flops.frozen_elements(config, frozen_weights(config, ["model.layers"]))
    heads = (1 + config.mtp_num_layers) * config.vocab_size * config.hidden_size
    assert frozen == flops.matrix_elements(config, mtp=True) - heads


def of_models(variant: str) -> tuple[int, int, int]:
    from mca_lib.models import AutoModel
    from mca_lib.parallel import initialize_model_parallel
    from tests.mca_lib.models.layouts import layout_args

    args = layout_args(tensor=2)
    initialize_model_parallel(args)
    models = AutoModel.from_config(config_from_hf(hf_config(variant).to_dict()), args)
    return models.num_parameters(total=True), models.num_parameters(), models.num_floating_point_operations(64, 16)


def counts(variants: list[str]) -> dict[str, tuple[int, int]]:
    """Variant → its parameters, and those of the only rank."""
    from mca_lib.models import AutoModel
    from mca_lib.parallel import initialize_model_parallel
    from tests.mca_lib.models.layouts import layout_args

    initialize_model_parallel(layout_args())
    models = {v: AutoModel.from_config(config_from_hf(hf_config(v, vocab_size=128).to_dict())) for v in variants}
    return {v: (m.num_parameters(total=True), m.num_parameters()) for v, m in models.items()}


def test_only_rank_holds_all_parameters(ranks: Any) -> None:
    """Of a vocabulary without padding."""
    (counted,) = ranks(1, counts, ["llama", "llama-tied", "qwen2-moe", "deepseek-mtp"])
    for variant, (total, own) in counted.items():
        assert total == own, variant


def test_models_answer_for_the_whole_model_on_every_rank(ranks: Any) -> None:
    (first, second) = ranks(2, of_models, "llama")
    total, own, operations = first
    assert (total, operations) == (second[0], second[2])
    assert own < total < own + second[1]  # norms are on both ranks
    assert operations == flops.training_flops(config_from_hf(hf_config("llama").to_dict()), 64, 16)
