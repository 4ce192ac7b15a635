"""What the ranks of `test_peculiar_families` run."""

import json
import shutil
from pathlib import Path
from typing import Any

from tests.mca_lib.models import parity_ranks
from tests.mca_lib.models.layouts import layout_args
from tests.mca_lib.tiny_models import hf_model, token_ids


def _load(directory: Path, args: Any | None = None) -> Any:
    from megatron.core import parallel_state

    from mca_lib.models import AutoModel
    from mca_lib.parallel import initialize_model_parallel

    args = args or layout_args()
    if not parallel_state.is_initialized():
        initialize_model_parallel(args)
    return AutoModel.from_pretrained(directory, args).eval()


def _logits(models: Any, ids_BS: Any) -> Any:
    import torch

    positions_BS = torch.arange(ids_BS.shape[1]).expand_as(ids_BS)
    with torch.no_grad():
        return models[0](ids_BS, positions_BS)[..., : models.mca_config.vocab_size]


def _reference(variant: str, ids_BS: Any) -> Any:
    import torch

    with torch.no_grad():
        return hf_model(variant)(ids_BS, use_cache=False).logits


def errors_of_changed(directory: Path, variant: str, changes: list[dict[str, Any]]) -> list[float]:
    """Largest |Δ| of a logit from transformers, once for every change of config.json on our side."""
    ids_BS = token_ids()
    reference, path, errors = _reference(variant, ids_BS), directory / "config.json", []
    source = path.read_text()
    for change in changes:
        path.write_text(json.dumps(json.loads(source) | change))
        errors.append((_logits(_load(directory), ids_BS) - reference).abs().max().item())
    path.write_text(source)
    return errors


def errors_without(directory: Path) -> dict[str, float]:
    """The same with weights of our side at their neutral value, by the end of their name."""
    import torch

    ids_BS, errors = token_ids(), {}
    neutral = {
        "gpt-oss": {"softmax_offset": -30.0, "router.bias": 0.0, "linear_fc1.bias": 0.0, "linear_fc2.bias": 0.0},
        "gemma3": {"post_attention_layernorm.weight": 0.0, "post_mlp_layernorm.weight": 0.0},
        "olmo2": {"query_norm.weight": 1.0, "key_norm.weight": 1.0, "post_mlp_layernorm.weight": 1.0},
    }
    for variant, ends in neutral.items():
        reference = _reference(variant, ids_BS)
        for end, value in ends.items():
            models = _load(directory / variant)
            found = [p for name, p in models.named_parameters() if name.endswith(end)]
            assert found, end
            with torch.no_grad():
                for parameter in found:
                    parameter.fill_(value)
            errors[f"{variant} {end}"] = (_logits(models, ids_BS) - reference).abs().max().item()
    return errors


def scaled_embeddings_are_equal(directory: Path) -> list[bool]:
    """In fp32 and in bf16, bit by bit."""
    import torch
    from transformers import AutoModelForCausalLM

    equal = []
    for bf16 in (False, True):
        models = _load(directory, layout_args(bf16=bf16))
        dtype = torch.bfloat16 if bf16 else torch.float32
        theirs = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype).model.embed_tokens
        ids_BS = token_ids()
        found_SBH = models[0].embedding(ids_BS, torch.arange(ids_BS.shape[1]).expand_as(ids_BS))
        equal.append(torch.equal(found_SBH.transpose(0, 1), theirs(ids_BS)) and found_SBH.dtype == dtype)
    return equal


def round_trip(directory: Path, work: Path, layout: dict[str, Any]) -> list[str]:
    """Names of tensors that differ after: load from Hugging Face, save, load, export."""
    import torch.distributed as dist

    from mca_lib.checkpoint.model import load_model, save_model
    from mca_lib.verification.round_trip import compare_weights

    models = _load(directory, layout_args(**layout))
    if dist.get_rank() == 0:
        shutil.rmtree(work / "mca", ignore_errors=True)
    dist.barrier()
    save_model(list(models), work / "mca")
    load_model(list(models), work / "mca")
    models.save_pretrained_as_hf(work / "back")
    return list(compare_weights(directory, work / "back").different)


def compare_with_megatrons_expert_bias(directory: Path, layout: dict[str, Any]) -> parity_ranks.Errors:
    """As `parity_ranks.compare`, with Megatron's own class in place of `ExpertRowParallelLinear`."""
    from megatron.core.tensor_parallel import RowParallelLinear

    from mca_lib.models import layer_spec

    layer_spec.ExpertRowParallelLinear = RowParallelLinear
    return parity_ranks.compare(directory, ["gpt-oss"], layout)["gpt-oss"]


def names_that_are_summed() -> bool:
    """Does Megatron look at names of parameters when it sums gradients over tensor parallel ranks?"""
    import inspect

    from megatron.core.distributed import finalize_model_grads

    return '"q_layernorm" in name' in inspect.getsource(inspect.getmodule(finalize_model_grads))


def save_with_blocks(directory: Path) -> None:
    """A GPT-OSS whose experts' sizes are multiples of a block of MXFP4."""
    from tests.mca_lib.tiny_models import save_hf

    save_hf(directory, "gpt-oss", intermediate_size=64, num_hidden_layers=2, layer_types=None)


def differing_from_transformers(directory: Path) -> list[str]:
    """Tensors that we show otherwise than transformers dequantizes them; `logits` where no reference is computed."""
    import torch
    from transformers import AutoModelForCausalLM

    from mca_lib.converter.hf_source import HfSource
    from mca_lib.converter.parity import hf_logits

    theirs = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16).state_dict()
    with HfSource(directory) as source:
        different = [n for n in source.tensors if n not in theirs or not torch.equal(source.slice(n)[:], theirs[n])]
    return [*different, *(["logits"] if not hf_logits(directory, [1, 2, 3]).isfinite().all() else [])]


def export(directory: Path, output: Path, layout: dict[str, Any]) -> None:
    """Load and write back, without a checkpoint between."""
    _load(directory, layout_args(**layout)).save_pretrained_as_hf(output)
