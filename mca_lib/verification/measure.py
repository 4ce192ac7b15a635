"""What the ranks of a verification do, at one layout: load, run, compare with transformers; write back and compare.

Replicas of the data dimension begin with different rows, so that tokens which experts hand to the wrong rank show.

B rows, S tokens of a row, H positions that a context parallel rank holds, V vocabulary.
"""

import itertools
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region
from safetensors import safe_open

from mca_lib.models import AutoModel
from mca_lib.models.layout import ARGUMENTS, Layout
from mca_lib.models.model_factory import VirtualModels
from mca_lib.models.packing import packed_row
from mca_lib.parallel import DistributingParallelArguments, initialize_model_parallel
from mca_lib.verification.difference import RankReport, Sums, difference
from mca_lib.verification.images import image_index, images_of, positions_of
from mca_lib.verification.reference import LOGITS_FILE, use_cores
from mca_lib.verification.round_trip import compare_weights
from mca_lib.verification.sample import Sample


def measure(directory: Path, work: Path, layout: Layout, sample: Sample) -> RankReport:
    """Compare the model of `directory` at this layout with the reference in `work`, then write it back and compare."""
    models = _load(directory, layout)
    everything, with_loss = _compare(models, work, sample)
    output = work / "round-trip"
    models.save_pretrained_as_hf(output)
    returned = None
    if dist.get_rank() == 0:
        returned = compare_weights(directory, output)
        shutil.rmtree(output)
    return RankReport(everything, with_loss, returned)


def compare(directory: Path, work: Path, sample: Sample) -> Sums:
    """Difference on one rank."""
    return _compare(_load(directory, Layout()), work, sample)[0]


@torch.no_grad()
def compare_perturbed(directory: Path, work: Path, sample: Sample, name: str, amount: float) -> Sums:
    """Difference on one rank after `amount` was added to the first element of one weight, by its checkpoint's name."""
    models = _load(directory, Layout())
    dict(models.named_parameters())[name].view(-1)[0] += amount
    return _compare(models, work, sample)[0]


@torch.no_grad()
def greedy(directory: Path, prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
    """The most likely continuations, on one rank, each step computed from the whole text: there is no cache to trust.

    The texts are the documents of one row.
    """
    models = _load(directory, Layout())
    texts = [list(prompt) for prompt in prompts]
    for _ in range(new_tokens):
        bounds = [0, *itertools.accumulate(map(len, texts))]
        ids_1S = torch.tensor([list(itertools.chain.from_iterable(texts))])
        positions_1S = torch.cat([torch.arange(len(text)) for text in texts])[None]
        logits_1SV = models[0](ids_1S, positions_1S, packed_seq_params=packed_row(bounds, ids_1S.device))
        for text, stop in zip(texts, bounds[1:], strict=True):
            text.append(logits_1SV[0, stop - 1, : models.mca_config.vocab_size].argmax().item())
    return [text[len(prompt) :] for text, prompt in zip(texts, prompts, strict=True)]


def _load(directory: Path, layout: Layout) -> VirtualModels:
    use_cores()
    sizes = {argument: getattr(layout, field) for field, argument in ARGUMENTS.items()}
    initialize_model_parallel(DistributingParallelArguments(**sizes))
    return AutoModel.from_pretrained(directory, SimpleNamespace(**sizes)).eval()


def _compare(models: VirtualModels, work: Path, sample: Sample) -> tuple[Sums, Sums]:
    ids_BS = torch.tensor(sample.ids_BS)
    shift = parallel_state.get_data_parallel_rank()
    rows = [(row + shift) % len(ids_BS) for row in range(len(ids_BS))]
    held_H = _held_positions(models, ids_BS.shape[1])
    logits_BHV = _forward(models, sample, rows)
    if logits_BHV is None or parallel_state.get_tensor_model_parallel_rank() != 0:
        return Sums(), Sums()
    with safe_open(work / LOGITS_FILE, framework="pt") as file:
        reference = (file.get_tensor(f"row.{row}")[held_H] for row in rows)
        return difference(reference, logits_BHV, torch.tensor(sample.loss_BS)[rows][:, held_H])


def _held_positions(models: VirtualModels, length: int) -> torch.Tensor:
    """Positions of a row that this context parallel rank has, from the model's own slicing, [H]."""
    return models.get_batch_on_this_cp_rank({"positions": torch.arange(length)[None]})["positions"][0]


@torch.no_grad()
def _forward(models: VirtualModels, sample: Sample, rows: list[int]) -> torch.Tensor | None:
    """fp32 logits [B, H, V] on the last pipeline stage, None on the others; each row is one micro batch."""
    ids_BS = torch.tensor(sample.ids_BS)[rows]
    stages = models.config.pipeline_model_parallel_size
    micro_batches = -(-len(ids_BS) // stages) * stages  # an interleaved schedule takes whole rounds
    batch = {"ids": ids_BS, "positions": torch.arange(ids_BS.shape[1]).expand_as(ids_BS)}
    if sample.grids:
        batch["image_index"] = image_index(models.mca_config, ids_BS)
    batch = models.get_batch_on_this_cp_rank(batch)
    batches = [{k: v[i % len(ids_BS)][None] for k, v in batch.items()} for i in range(micro_batches)]
    if sample.grids:
        for i, own in enumerate(batches):
            row = rows[i % len(rows)]
            own["positions"] = torch.from_numpy(positions_of(models.mca_config, sample, row)).unsqueeze(1)
            own["images"] = {
                "images": images_of(models.mca_config, sample, row),
                "image_index_BS": own["image_index"],
            }
    kept: list[torch.Tensor] = []

    def step(batches: Iterator[dict[str, torch.Tensor]], model: torch.nn.Module) -> tuple[torch.Tensor, Any]:
        batch = next(batches)
        output = model(batch["ids"], batch["positions"], None, **batch.get("images", {}))

        def keep(output: torch.Tensor, non_loss_data: bool = False) -> torch.Tensor:
            kept.append(output.detach().float())
            return output

        return output, keep

    chunks = list(models)
    get_forward_backward_func()(
        forward_step_func=step,
        data_iterator=[iter(batches) for _ in chunks] if len(chunks) > 1 else iter(batches),
        model=chunks if len(chunks) > 1 else chunks[0],
        num_microbatches=micro_batches,
        seq_length=ids_BS.shape[1],
        micro_batch_size=1,
        forward_only=True,
        collect_non_loss_data=True,
    )
    if not kept:
        return None
    logits_BHV = torch.cat(kept[: len(ids_BS)])
    return gather_from_tensor_model_parallel_region(logits_BHV)[..., : models.mca_config.vocab_size]
