"""Trainings of ours start from what Megatron-FSDP has written: every tensor, and how the training goes on."""

import re

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from mca_lib.models.hybrid.names import transformer_name
from mca_lib.models.hybrid.pattern import LayerMap
from mca_lib.models.naming import written_out
from tests.mca_lib.checkpoint import fsdp_ranks
from tests.mca_lib.tiny_models import SIZES, save_hf

VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight")
DENSE, EXPERTS = "*-" * 4, "*E" * 4
MAMBA = {"mamba_head_dim": 8, "mamba_state_size": 8}
SOURCES = {"llama": {}, "mixtral": {"expert_model_parallel_size": 2}}
"""Model → how it was trained on two ranks under Megatron-FSDP."""

ROWS = {
    "one rank": ("llama", 1, {}),
    "TP2, hybrid": ("llama", 2, {"tensor_model_parallel_size": 2, "pattern": DENSE}),
    "DP2, hybrid with Mamba layers": ("llama", 2, {"pattern": "M*-*-M*-*-", **MAMBA}),
    "experts of EP2 on one rank, hybrid": ("mixtral", 1, {"pattern": EXPERTS}),
}
"""Case → (model, ranks, options of the run that starts); more of them are in tests/acceptance/fsdp_to_hybrid.py."""

LOCAL_NAMES = (
    ("input_layernorm.", "self_attention.linear_qkv.layer_norm_"),
    ("local_experts.", "experts."),
)


@pytest.fixture(scope="module")
def written(ranks, tmp_path_factory):
    """Model → (its directory, checkpoint of its training under Megatron-FSDP, how the training went on)."""
    found, directory = {}, tmp_path_factory.mktemp("fsdp")
    for name, options in SOURCES.items():
        hf, checkpoint = directory / name, directory / f"{name}-checkpoint"
        ranks(1, save_hf, hf, name, "bfloat16")
        found[name] = hf, checkpoint, ranks(2, fsdp_ranks.run, "write", options, hf, checkpoint)[0]
    return found


@pytest.mark.parametrize("case", ROWS)
def test_a_run_has_every_tensor_and_goes_on_as_the_one_before(ranks, written, tmp_path, case):
    model, size, options = ROWS[case]
    hf, checkpoint, history = written[model]
    found = ranks(size, fsdp_ranks.run, "go_on", options, hf, checkpoint, tmp_path / "state")[0]
    assert (found["step"], set(found["adam"])) == (3, {3})
    ours, theirs = of_a_run(tmp_path / "state", options.get("pattern")), of_megatron_fsdp(checkpoint)
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        rows = SIZES["vocab_size"] if name[1] in VOCABULARY else len(tensor)
        assert torch.equal(ours[name][:rows], tensor[:rows]), name
        assert not ours[name][rows:].any(), name
    if "M" not in options.get("pattern", ""):
        exact = "tensor_model_parallel_size" not in options  # with it sums of bf16 have another order
        assert found["history"][0][0] == pytest.approx(history[0][0], rel=1e-6 if exact else 1e-3)
        # Gradients of bf16 differ: under Megatron-FSDP one rank and two differ by as much.
        assert found["history"][1][0] == pytest.approx(history[1][0], rel=4e-3)


def test_fresh_layers_keep_their_initialization_with_masters_and_move(ranks, written, tmp_path):
    from mca_lib.models.config import McaModelConfig
    from mca_lib.models.hybrid.fresh import fresh_tensors

    hf, checkpoint, _ = written["llama"]
    pattern = "M*-*-*-*-"
    found = ranks(1, fsdp_ranks.run, "go_on", {"pattern": pattern, **MAMBA}, hf, checkpoint, tmp_path / "s")
    stored = tensors(tmp_path / "s")
    args = fsdp_ranks.training_args(hybrid_layer_pattern=pattern, **MAMBA)
    config = McaModelConfig.from_pretrained(hf)
    config = config.with_hybrid(args.hybrid_layers(config.hidden_size))
    for name, drawn in fresh_tensors(config, 0, 0, "random"):
        assert torch.equal(whole(stored, f"optimizer.state.param.{name}"), drawn.bfloat16().float()), name
        assert not whole(stored, f"optimizer.state.exp_avg.{name}").any(), name
    assert found[0]["history"][1] != found[0]["history"][0]


def whole(stored, name):
    """A tensor of a Mamba layer, whose projections Megatron stores in parts."""
    parts = [stored[key] for key in (name, *(f"{name}.{part}" for part in ("z", "x", "B", "C", "dt"))) if key in stored]
    return torch.cat(parts)


def of_a_run(state, pattern):
    """(kind, name in a transformer's checkpoint) → tensor of a training checkpoint of ours, but for fresh layers."""
    kinds = {"optimizer.state.param.": "master", "optimizer.state.exp_avg.": "exp_avg"}
    # `fp32_param` where the optimizer is not distributed.
    kinds |= {"optimizer.state.exp_avg_sq.": "exp_avg_sq", "optimizer.state.fp32_param.": "master", "": "weight"}
    found = {}
    for key, tensor in tensors(state).items():
        prefix = next(prefix for prefix in kinds if key.startswith(prefix))
        for name, index, _ in written_out(key.removeprefix(prefix), tuple(tensor.shape)):
            if pattern is not None and (name := transformer_name(name, LayerMap(pattern))) is None:
                continue
            found[kinds[prefix], name] = tensor[index]
    return found


def of_megatron_fsdp(checkpoint):
    """The same of a checkpoint of Megatron-FSDP, whose weights are the masters."""
    stored, found = tensors(checkpoint), {}
    for key, tensor in stored.items():
        if key.endswith("weight_v") or ".weight_v." in key:
            continue
        if "weight_w" in key:
            tensor = torch.cat([tensor, stored[key.replace("weight_w", "weight_v")]])
        name = re.sub(r"^(model|optimizer\.state)\.(module\.)+", "", key).replace("weight_w", "weight")
        kind = name.rpartition(".")[2]
        kind = kind if kind.startswith("exp_avg") else "master"
        name = name.removesuffix(f".{kind}")
        names = (
            LOCAL_NAMES
            if "experts" in str(stored.keys())
            else (*LOCAL_NAMES, ("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_"))
        )
        for own, fused in names:
            name = name.replace(own, fused)
        found[kind, name] = tensor
        if kind == "master":
            found["weight", name] = tensor.bfloat16()
    return found


def tensors(directory):
    """All tensors of a checkpoint, read by torch alone."""
    reader = dcp.FileSystemReader(directory)
    found = {
        key: torch.empty(meta.size, dtype=meta.properties.dtype)
        for key, meta in reader.read_metadata().state_dict_metadata.items()
        if isinstance(meta, TensorStorageMetadata)
    }
    dcp.load(found, storage_reader=reader, no_dist=True)
    return found
