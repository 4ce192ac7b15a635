"""What the ranks of a vision test run: packed rows with no, one and several images, on Megatron and on transformers.

The reference runs document by document, in fp32 with eager attention.

S tokens of this rank, T of the row.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.mca_lib.models.parity_ranks import Errors

Grid = tuple[int, int, int]

LENGTHS = (8, 24, 16)
"""Of the documents of a row; each divides by 2 x 2 context parallel ranks."""
ROWS: tuple[tuple[tuple[int, int, Grid], ...], ...] = (
    ((1, 3, (1, 4, 6)), (1, 12, (1, 2, 6))),
    (),
    ((2, 5, (1, 4, 4)),),
    ((0, 2, (1, 4, 4)), (1, 0, (1, 4, 6)), (2, 10, (1, 2, 6))),
)
"""Of each micro batch: (document, its token, grid) of the images. The second has none, the third fewer than ranks."""


def prepare(directory: Path, model_types: list[str]) -> None:
    """Write tiny models of these families."""
    from mca_lib.verification.tiny import make_tiny

    for model_type in model_types:
        make_tiny(directory / model_type, model_type)


def compare(
    directory: Path, model_types: list[str], sizes: dict[str, Any], recompute: str | None = None
) -> dict[str, Errors]:
    """Errors of this rank for every family, at one layout."""
    from mca_lib.models import AutoModel
    from mca_lib.parallel import initialize_model_parallel
    from tests.mca_lib.models.layouts import layout_args

    args = layout_args(**sizes)
    args.recompute_granularity = recompute
    initialize_model_parallel(args)
    return {m: _compare_one(AutoModel.from_pretrained(directory / m, args).train(), directory / m) for m in model_types}


def dtypes_in_bf16(directory: Path) -> dict[str, str]:
    """Name → dtype of the floating tensors of a chunk that is cast to bf16, buffers included."""
    from mca_lib.models import AutoModel
    from mca_lib.parallel import initialize_model_parallel
    from tests.mca_lib.models.layouts import layout_args

    args = layout_args(bf16=True)
    initialize_model_parallel(args)
    chunk = AutoModel.from_pretrained(directory, args)[0].bfloat16()
    tensors = [*chunk.named_parameters(), *chunk.named_buffers()]
    return {name: str(t.dtype).removeprefix("torch.") for name, t in tensors if t.is_floating_point()}


def _compare_one(models: Any, directory: Path) -> Errors:
    import torch

    from tests.mca_lib.models.parity_ranks import packed_params

    hf, rows = _reference_model(directory), [_row(models.mca_config, number) for number in range(len(ROWS))]
    expected = [_reference_losses(hf, models.mca_config, row) for row in rows]
    torch.cat(expected).mean().backward()
    packed = packed_params(LENGTHS)
    held = models.get_batch_on_this_cp_rank({"at": torch.arange(sum(LENGTHS))[None]}, packed)["at"][0]
    kept = losses(models, rows, packed)
    loss = max(((a - b[held]).abs().max().item() for a, b in zip(kept, expected, strict=False)), default=0.0)
    worst, name, count = _worst_gradient(models, {n: p.grad for n, p in hf.named_parameters()})
    return Errors(0.0, loss, worst, name, count)


def _row(config: Any, number: int) -> dict[str, Any]:
    """Tokens, images and positions of a micro batch."""
    import numpy as np
    import torch

    from mca_lib.models.vision.images import Images, features
    from mca_lib.models.vision.positions import document_positions
    from mca_lib.verification.images import image_index, pixels

    generator = torch.Generator().manual_seed(number)
    ids_1T = torch.randint(3, 1000, (1, sum(LENGTHS)), generator=generator)
    labels_1T = torch.randint(3, 1000, (1, sum(LENGTHS)), generator=generator)
    starts, grids = np.cumsum([0, *LENGTHS]), [[] for _ in LENGTHS]
    for document, at, grid in ROWS[number]:
        begin = starts[document] + at
        ids_1T[0, begin : begin + features(grid, 2)] = config.vision.image_token_id
        grids[document].append(grid)
    positions = [
        document_positions(ids_1T[0, a:b].numpy(), own, config.vision.image_token_id, 2)
        for a, b, own in zip(starts, starts[1:], grids, strict=False)
    ]
    everything = tuple(grid for own in grids for grid in own)
    return {
        "input_ids": ids_1T,
        "labels": labels_1T,
        "image_index_BS": image_index(config, ids_1T),
        "position_ids": torch.from_numpy(np.concatenate(positions, axis=1)).unsqueeze(1),
        "grids": grids,
        "images": Images(everything, {i: pixels(config, number, i, g) for i, g in enumerate(everything)}),
    }


def _reference_model(directory: Path) -> Any:
    import torch
    from transformers import AutoModelForImageTextToText

    return AutoModelForImageTextToText.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")


def _reference_losses(hf: Any, config: Any, row: dict[str, Any]) -> Any:
    """Loss of each token, [T]."""
    import torch

    outputs, used = [], 0
    for ids_1S, grids in zip(row["input_ids"].split(list(LENGTHS), dim=1), row["grids"], strict=True):
        images = {}
        if grids:
            pixels = [row["images"].pixels[used + i] for i in range(len(grids))]
            images = {
                "pixel_values": torch.cat(pixels),
                "image_grid_thw": torch.tensor(grids),
                "mm_token_type_ids": (ids_1S == config.vision.image_token_id).int(),
            }
            used += len(grids)
        outputs.append(hf(ids_1S, use_cache=False, **images).logits[0])
    return torch.nn.functional.cross_entropy(torch.cat(outputs), row["labels"][0], reduction="none")


def losses(models: Any, rows: list[dict[str, Any]], packed: Any) -> list[Any]:
    """Losses of this rank's tokens of each micro batch, on the last stage; gradients of the mean are in `main_grad`."""
    import torch
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.pipeline_parallel import get_forward_backward_func

    config, kept = models.config, []
    config.calculate_per_token_loss = True
    config.finalize_model_grads_func = finalize_model_grads
    batches = [models.get_batch_on_this_cp_rank({k: v for k, v in row.items() if k != "grids"}, packed) for row in rows]

    def forward_step(batches: Any, model: Any) -> Any:
        batch = dict(next(batches))
        output = model(batch.pop("input_ids"), batch.pop("position_ids"), None, packed_seq_params=packed, **batch)

        def loss(output: Any) -> Any:
            kept.append(output.detach()[0].clone())
            return output.sum(), torch.tensor(output.numel()), {}

        return output, loss

    ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True, bucket_size=None)
    chunks = [DistributedDataParallel(config, ddp, m) for m in models]
    get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=[iter(batches) for _ in chunks] if len(chunks) > 1 else iter(batches),
        model=chunks if len(chunks) > 1 else chunks[0],
        num_microbatches=len(batches),
        seq_length=sum(LENGTHS),
        micro_batch_size=1,
        forward_only=False,
    )
    return kept


def _worst_gradient(models: Any, gradients: dict[str, Any]) -> tuple[float, str, int]:
    from mca_lib.converter.plan import entries
    from mca_lib.parallel import tensor_place

    config = replace(models.mca_config, source_prefixes={})
    rows, place = {e.mca: e for e in entries(config)}, tensor_place()
    worst, worst_name, count = 0.0, "", 0
    for name, parameter in models.named_parameters():
        row = rows[name]
        expected = row.mapping.to_mca([gradients[n] for n in row.hf], config, *place.of(row.mapping))
        error = ((parameter.main_grad - expected).norm() / expected.norm()).item()
        count += 1
        if not error <= worst:
            worst, worst_name = error, name
    return worst, worst_name, count


def losses_of_changed(directory: Path, work: Path, changes: list[dict[str, Any]]) -> list[float]:
    """Largest difference of a loss from transformers' for the weights of `directory` with other fields in config.json.

    A field is named by its path, `vision_config.window_size`.
    """
    import copy
    import json

    from mca_lib.models import AutoModel
    from mca_lib.parallel import initialize_model_parallel
    from tests.mca_lib.models.layouts import layout_args

    initialize_model_parallel(layout_args())
    source, found = json.loads((directory / "config.json").read_text()), []
    for number, change in enumerate(changes):
        changed, hf = work / str(number), copy.deepcopy(source)
        changed.mkdir(parents=True)
        for path in directory.iterdir():
            if path.name != "config.json":
                (changed / path.name).symlink_to(path)
        for path, value in change.items():
            *parts, last = path.split(".")
            place = hf
            for part in parts:
                place = place[part]
            place[last] = value
        (changed / "config.json").write_text(json.dumps(hf))
        found.append(_compare_one(AutoModel.from_pretrained(changed).train(), directory).loss)
    return found


def grown(directory: Path, out: Path, size: int) -> tuple[int, list[int], int]:
    """Export a model with `size` rows for its vocabulary: (rows of config.json, shape of the embedding, largest id that
    transformers takes)."""
    import json
    from types import SimpleNamespace

    import torch
    from safetensors.torch import load_file

    from mca_lib.models import AutoModel
    from mca_lib.parallel import initialize_model_parallel
    from tests.mca_lib.models.layouts import layout_args

    args = layout_args()
    initialize_model_parallel(args)
    tokenizer = SimpleNamespace(get_vocab=lambda: {"last": size - 1})
    AutoModel.from_pretrained(directory, args, tokenizer=tokenizer).save_pretrained_as_hf(out)
    embedding = load_file(out / "model.safetensors")["model.embed_tokens.weight"]
    _reference_model(out)(torch.tensor([[size - 1]]))
    return json.loads((out / "config.json").read_text())["text_config"]["vocab_size"], list(embedding.shape), size - 1
