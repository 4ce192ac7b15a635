"""What transformers computes: logits in fp32 with eager attention, and greedy generations. Runs in a rank of its own.

B rows, S tokens of a row, V vocabulary.
"""

import os
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from mca_lib.converter.parity import has_safetensors
from mca_lib.models.config import McaModelConfig
from mca_lib.models.transformers_class import auto_class
from mca_lib.verification.difference import difference
from mca_lib.verification.images import images_of
from mca_lib.verification.sample import Sample

LOGITS_FILE = "reference.safetensors"
"""`row.0`, `row.1`, ...: fp32 [S, V] each."""


def write_reference(directory: Path, work: Path, sample: Sample) -> float:
    """Write transformers' logits of the sample into `work`; returns the largest |logit|."""
    rows = _logits(directory, "eager", torch.float32, sample)
    save_file({f"row.{i}": row_SV for i, row_SV in enumerate(rows)}, work / LOGITS_FILE)
    return max(row_SV.abs().max().item() for row_SV in rows)


def own_difference(directory: Path, work: Path, sample: Sample) -> dict[str, Any]:
    """transformers' SDPA attention against its eager one: how far equal mathematics in fp32 is apart.

    With attention sinks, for which it has no SDPA, its eager one in float64 instead.
    """
    from dataclasses import asdict

    from safetensors import safe_open

    sinks = McaModelConfig.from_pretrained(directory).attention_sinks
    how = ("eager", torch.float64) if sinks else ("sdpa", torch.float32)
    logits_BSV = torch.stack(_logits(directory, *how, sample))
    with safe_open(work / LOGITS_FILE, framework="pt") as file:
        rows = (file.get_tensor(f"row.{i}") for i in range(len(sample.ids_BS)))
        everything, _ = difference(rows, logits_BSV, torch.tensor(sample.loss_BS))
    return asdict(everything.measured())


def greedy(directory: Path, prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
    """transformers' own `generate`, with its cache, one prompt at a time; the end of a text does not end it."""
    from transformers import GenerationConfig

    model = _load(directory)
    model.generation_config = GenerationConfig(max_new_tokens=new_tokens, min_new_tokens=new_tokens, do_sample=False)
    model.generation_config.pad_token_id = 0
    outputs = []
    for prompt in prompts:
        ids_1S = torch.tensor([prompt])
        with torch.no_grad():
            output_1T = model.generate(ids_1S, attention_mask=torch.ones_like(ids_1S))
        outputs.append(output_1T[0, len(prompt) :].tolist())
    return outputs


def _load(directory: Path, attention: str = "eager", dtype: torch.dtype = torch.float32) -> Any:
    use_cores()
    return (
        auto_class(directory)
        .from_pretrained(
            directory,
            dtype=dtype,
            attn_implementation=attention,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=has_safetensors(directory),
        )
        .eval()
    )


def use_cores() -> None:
    """Ranks begin with one thread each; here they share the machine's cores."""
    cores = len(os.sched_getaffinity(0))
    torch.set_num_threads(max(1, cores // int(os.environ["WORLD_SIZE"])))


def _logits(directory: Path, attention: str, dtype: torch.dtype, sample: Sample) -> list[torch.Tensor]:
    model = _load(directory, attention, dtype)
    config = McaModelConfig.from_pretrained(directory)
    if dtype == torch.float64 and config.moe is not None:
        model.set_experts_implementation("eager")  # the kernel that takes all experts at once has no float64
    with torch.no_grad():
        return [
            model(torch.tensor([ids_S]), use_cache=False, **_images(config, sample, row)).logits[0].float()
            for row, ids_S in enumerate(sample.ids_BS)
        ]


def _images(config: McaModelConfig, sample: Sample, row: int) -> dict[str, torch.Tensor]:
    """Arguments of transformers' model for the images of a row."""
    if not sample.grids or not sample.grids[row]:
        return {}
    images = images_of(config, sample, row)
    ids_1S = torch.tensor([sample.ids_BS[row]])
    return {
        "pixel_values": torch.cat(list(images.pixels.values())),
        "image_grid_thw": torch.tensor(images.grids),
        "mm_token_type_ids": (ids_1S == config.vision.image_token_id).int(),
    }
