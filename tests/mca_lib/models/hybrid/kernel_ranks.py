"""What the ranks of the reference kernels' tests run."""

import importlib
import sys
import types
from typing import Any

import torch

from mca_lib.models.hybrid.reference_kernels import MIXER, PACKAGES, install_reference_kernels
from tests.mca_lib.models.layouts import layout_args

CONTEXT_PARALLEL = "megatron.core.ssm.mamba_context_parallel"
HIDDEN, HEADS, HEAD_DIM, STATE, GROUPS = 16, 4, 8, 16, 2


def norm_differences() -> dict[str, float]:
    """Class of transformers -> largest difference, in groups of channels, gated before the norm."""
    from transformers.models.mamba2.modeling_mamba2 import MambaRMSNormGated
    from transformers.models.zamba2.modeling_zamba2 import Zamba2RMSNormGated

    from mca_lib.models.hybrid.gated_norm import RMSNormGated

    x, z, weight = torch.randn(3, 5, 32), torch.randn(3, 5, 32), torch.randn(32)
    found = {}
    for theirs in (MambaRMSNormGated, Zamba2RMSNormGated):
        reference = theirs(32, group_size=8, eps=1e-5)
        norm = RMSNormGated(32, eps=1e-5, group_size=8, norm_before_gate=False)
        for module in (reference, norm):
            module.weight.data.copy_(weight)
        found[theirs.__name__] = (norm(x, z) - reference(x, z)).abs().max().item()
    return found


def make_mixer(context: int = 1) -> Any:
    """Megatron's mixer of this rank with weights that do not depend on the layout."""
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.ssm.mamba_mixer import MambaMixer, MambaMixerSubmodules
    from megatron.core.transformer.transformer_config import TransformerConfig

    from mca_lib.parallel import initialize_model_parallel

    initialize_model_parallel(layout_args(context=context))
    config = TransformerConfig(
        num_layers=1,
        hidden_size=HIDDEN,
        num_attention_heads=1,
        mamba_num_heads=HEADS,
        mamba_head_dim=HEAD_DIM,
        mamba_state_dim=STATE,
        mamba_num_groups=GROUPS,
        context_parallel_size=context,
        gated_linear_unit=True,
    )
    linears = MambaMixerSubmodules(tensor_parallel.ColumnParallelLinear, tensor_parallel.RowParallelLinear)
    groups = ProcessGroupCollection.use_mpu_process_groups(["tp", "cp"])
    assert parallel_state.get_context_parallel_world_size() == context
    mixer = MambaMixer(config, linears, HIDDEN, layer_number=1, pg_collection=groups)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in mixer.parameters():
            parameter.copy_(0.5 * torch.randn(parameter.shape, generator=generator))
    return mixer


def hidden_states(length: int = 50) -> torch.Tensor:
    """[L, 1, H]"""
    return torch.randn(length, 1, HIDDEN, generator=torch.Generator().manual_seed(5))


def mixer_and_transformers() -> dict[str, float]:
    """Largest differences of the result and of its gradients between Megatron's mixer and transformers' Mamba2Mixer."""
    from transformers import Mamba2Config
    from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer
    from transformers.utils import is_mamba_2_ssm_available

    install_reference_kernels()
    assert not is_mamba_2_ssm_available()
    mixer = make_mixer()
    config = Mamba2Config(
        hidden_size=HIDDEN, num_heads=HEADS, head_dim=HEAD_DIM, state_size=STATE, n_groups=GROUPS, num_hidden_layers=1,
        layer_norm_epsilon=1e-5, chunk_size=16,
    )  # fmt: skip
    reference = Mamba2Mixer(config, layer_idx=0)
    names = {"conv1d_weight": "conv1d.weight", "conv1d_bias": "conv1d.bias"}
    theirs = dict(reference.named_parameters())
    pairs = {name: (ours, theirs[names.get(name, name)]) for name, ours in mixer.named_parameters()}
    assert len(pairs) == len(theirs)
    for ours, their in pairs.values():
        their.data.copy_(ours.data)
    hidden = hidden_states()
    found, _ = mixer(hidden)
    expected = reference(hidden.transpose(0, 1)).transpose(0, 1)
    factor = torch.randn_like(found)
    (found * factor).sum().backward()
    (expected * factor).sum().backward()
    relative = {n: ((o.grad - t.grad).abs().max() / t.grad.abs().max()).item() for n, (o, t) in pairs.items()}
    return {"result": (found - expected).abs().max().item(), **relative}


def stand_ins_are_gone() -> dict[str, bool]:
    """After two installations; a package of the same name that was there before is there again."""
    sys.modules["mamba_ssm"] = real = types.ModuleType("mamba_ssm")
    install_reference_kernels()
    install_reference_kernels()
    from megatron.core.ssm import mamba_mixer

    packing, why = mamba_mixer._check_mamba_sequence_packing_support(for_inference_not_training=False)
    inference, _ = mamba_mixer._check_mamba_sequence_packing_support(for_inference_not_training=True)
    return {
        "no stand-in is left": [name for name in sys.modules if name.split(".")[0] in PACKAGES] == ["mamba_ssm"],
        "what was there is back": sys.modules["mamba_ssm"] is real,
        "the mixer has ours": mamba_mixer.mamba_chunk_scan_combined.__module__ == "mca_lib.models.hybrid.ssd",
        f"packed training passes {why}": packing,
        "packed inference does not": not inference,
    }


def install_too_late() -> None:
    importlib.import_module(MIXER)
    install_reference_kernels()


def works_by_itself() -> dict[str, bool]:
    """What Megatron can do where nothing is installed."""
    return {
        "build a mixer": importlib.import_module(MIXER).HAVE_MAMBA_SSM,
        "order packed documents": importlib.import_module(CONTEXT_PARALLEL).tex is not None,
    }


def packed_mixer(context: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The whole row's result from packed documents of 16, 8 and 24 tokens, and the gradients of all weights."""
    from megatron.core import parallel_state
    from megatron.core.packed_seq_params import PackedSeqParams

    from mca_lib.models.packing import zigzag_index

    install_reference_kernels()
    mixer = make_mixer(context)
    bounds = [0, 16, 24, 48]
    packed = PackedSeqParams("thd", *[torch.tensor(bounds, dtype=torch.int32)] * 2, total_tokens=48)
    held = zigzag_index(bounds, context)
    mine = held[parallel_state.get_context_parallel_rank()]
    found, _ = mixer(hidden_states(48)[mine], packed_seq_params=packed)
    factor = torch.randn(48, 1, HIDDEN, generator=torch.Generator().manual_seed(7))
    (found * factor[mine]).sum().backward()
    whole = torch.zeros(48, 1, HIDDEN).index_copy(0, mine, found.detach())
    gradients = {name: parameter.grad for name, parameter in mixer.named_parameters()}
    for tensor in (whole, *gradients.values()):
        torch.distributed.all_reduce(tensor)
    return whole, gradients
