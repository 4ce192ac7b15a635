"""What the ranks of a parity test run: a Megatron model and its Hugging Face source on the same tokens.

The reference is transformers in fp32 with eager attention. Its gradients are mapped to Megatron's parameters by the
same linear map as the weights, which also gives each rank its share of them.

B batch, S tokens of a row, V vocabulary.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mca_lib.converter.stacked import number, whole
from tests.mca_lib.tiny_models import hf_model, mtp_as_stored, mtp_model, save_hf, token_ids

DOCUMENTS = (8, 16, 4, 20)
"""Lengths of the documents of a packed row; each divides by 2 x 2 context parallel ranks."""

MICRO_BATCHES = 4
"""Different ones, so that a pipeline that mixes them up shows. Packed rows come one by one, others by two."""


@dataclass(frozen=True)
class Errors:
    """Largest differences of one rank from transformers."""

    logits: float
    """Absolute."""
    loss: float
    """Absolute, per token."""
    gradient: float
    """Norm of the difference, relative to the norm of the parameter's gradient; the worst parameter."""
    gradient_of: str
    parameters: int
    """How many parameters were compared."""


def prepare(directory: Path, variants: list[str]) -> None:
    """Write the variants as Hugging Face directories."""
    for variant in variants:
        save_hf(directory / variant, variant)


def compare(
    directory: Path, variants: list[str], layout: dict[str, Any], packed: bool = False, training: bool = True
) -> dict[str, Errors]:
    """Errors of this rank for every variant, at one layout; without `training` those of logits and loss alone."""
    from mca_lib.models import AutoModel
    from mca_lib.parallel import initialize_model_parallel
    from tests.mca_lib.models.layouts import layout_args

    args = layout_args(**layout)
    initialize_model_parallel(args)
    return {
        v: _compare_one(AutoModel.from_pretrained(directory / v, args).train(training), v, packed) for v in variants
    }


def _compare_one(models: Any, variant: str, packed: bool) -> Errors:
    import torch

    lengths = DOCUMENTS if packed else None
    tokens_BT = token_ids(MICRO_BATCHES, sum(DOCUMENTS) + 1) if packed else token_ids(2 * MICRO_BATCHES, 33)
    input_ids_BS, labels_BS = tokens_BT[:, :-1], tokens_BT[:, 1:]
    hf = hf_model(variant)
    reference_BSV = _hf_logits(hf, input_ids_BS, lengths)
    losses_BS = torch.nn.functional.cross_entropy(reference_BSV.transpose(1, 2), labels_BS, reduction="none")
    mtp = mtp_model(hf) if getattr(hf.config, "num_mtp_layers", 0) else None
    (losses_BS.mean() + (_mtp_loss(hf, mtp, input_ids_BS, labels_BS, lengths) if mtp else 0)).backward()

    held = _held_positions(models, input_ids_BS, lengths)
    logits_BSV = megatron_outputs(models, input_ids_BS, None, lengths)
    training = models[0].training
    loss_BS = megatron_outputs(models, input_ids_BS, labels_BS, lengths, backward=training)
    worst, name, count = _worst_gradient(models, _gradients_as_stored(hf, mtp)) if training else (0.0, "", 0)
    return Errors(
        logits=0.0 if logits_BSV is None else (logits_BSV - reference_BSV[:, held]).abs().max().item(),
        loss=0.0 if loss_BS is None else (loss_BS - losses_BS[:, held]).abs().max().item(),
        gradient=worst,
        gradient_of=name,
        parameters=count,
    )


def _hf_logits(model: Any, input_ids_BS: Any, lengths: tuple[int, ...] | None) -> Any:
    """Each document on its own."""
    import torch

    pieces = input_ids_BS.split(list(lengths), dim=1) if lengths else [input_ids_BS]
    return torch.cat([model(p, use_cache=False).logits for p in pieces], dim=1)


def _held_positions(models: Any, input_ids_BS: Any, lengths: tuple[int, ...] | None) -> Any:
    """Positions of the row that this context parallel rank has, from the model's own slicing."""
    import torch

    positions = {"positions": torch.arange(input_ids_BS.shape[1])[None]}
    packed = packed_params(lengths) if lengths else None
    return models.get_batch_on_this_cp_rank(positions, packed)["positions"][0]


def packed_params(lengths: tuple[int, ...]) -> Any:
    """Megatron's description of a packed row."""
    import torch
    from megatron.core.packed_seq_params import PackedSeqParams

    bounds = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=bounds,
        cu_seqlens_kv=bounds,
        # The row's length, as a careless caller gives it: the model must find the longest document itself.
        max_seqlen_q=sum(lengths),
        max_seqlen_kv=sum(lengths),
    )


def megatron_outputs(
    models: Any, input_ids_BS: Any, labels_BS: Any | None, lengths: tuple[int, ...] | None, backward: bool = False
) -> Any:
    """Losses [B, S], or without labels logits [B, S, V], on the last stage; None on the others.

    The rows run in `MICRO_BATCHES` micro batches through Megatron's schedule of the layout. With `backward`, gradients
    of the mean loss are left in `main_grad` of the parameters.
    """
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

    config, kept = models.config, []
    config.calculate_per_token_loss = True
    packed = packed_params(lengths) if lengths else None
    import torch

    batch = {"input_ids": input_ids_BS, "position_ids": torch.arange(input_ids_BS.shape[1]).expand_as(input_ids_BS)}
    if labels_BS is not None:
        batch["labels"] = labels_BS
    batch = models.get_batch_on_this_cp_rank(batch, packed)
    rows = {k: v.chunk(MICRO_BATCHES) for k, v in batch.items()}
    batches = [{k: v[i] for k, v in rows.items()} for i in range(MICRO_BATCHES)]

    def forward_step(batches: Any, model: Any) -> Any:
        batch = next(batches)
        output = model(
            batch["input_ids"],
            batch["position_ids"],
            None,
            labels=batch.get("labels"),
            loss_mask=torch.ones_like(batch["labels"]) if "labels" in batch else None,
            packed_seq_params=packed,
        )

        def loss(output: Any, non_loss_data: bool = False) -> Any:
            kept.append(output.detach().clone())
            return output.sum(), torch.tensor(output.numel()), {}

        return output, loss

    chunks = list(models)
    if backward:
        ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True, bucket_size=None)
        chunks = [DistributedDataParallel(config, ddp, m) for m in chunks]
        config.finalize_model_grads_func = finalize_model_grads
    get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=[iter(batches) for _ in chunks] if len(chunks) > 1 else iter(batches),
        model=chunks if len(chunks) > 1 else chunks[0],
        num_microbatches=MICRO_BATCHES,
        seq_length=input_ids_BS.shape[1],
        micro_batch_size=input_ids_BS.shape[0] // MICRO_BATCHES,
        forward_only=not backward,
        collect_non_loss_data=not backward,
    )
    if not kept:
        return None
    if labels_BS is not None:
        return torch.cat(kept)
    return gather_from_tensor_model_parallel_region(torch.cat(kept))[..., : models.mca_config.vocab_size]


def _worst_gradient(models: Any, gradients: dict[str, Any]) -> tuple[float, str, int]:
    from mca_lib.converter.plan import entries
    from mca_lib.parallel import tensor_place

    rows = {e.mca: e for e in entries(models.mca_config)}
    place = tensor_place()
    worst, worst_name, count = 0.0, "", 0
    for name, parameter in models.named_parameters():
        row = rows[name]
        parts = [_as_named(gradients, n) for n in row.hf]
        expected = row.mapping.to_mca(parts, models.mca_config, *place.of(row.mapping))
        error = ((parameter.main_grad - expected).norm() / expected.norm()).item()
        count += 1
        if not error <= worst:
            worst, worst_name = error, name
    return worst, worst_name, count


def _as_named(tensors: dict[str, Any], name: str) -> Any:
    """A tensor, or the part of a stacked one."""
    stacked = tensors[whole(name)]
    return stacked if number(name) is None else stacked[number(name)]


def _gradients_as_stored(hf: Any, mtp: Any | None) -> dict[str, Any]:
    """Gradients under the names of a saved model, which has one tensor per expert."""
    from transformers.core_model_loading import revert_weight_conversion

    gradients = revert_weight_conversion(hf, {name: p.grad for name, p in hf.named_parameters()})
    return gradients | (mtp_as_stored(hf, {name: p.grad for name, p in mtp.named_parameters()}) if mtp else {})


def _mtp_loss(hf: Any, mtp: Any, input_ids_BS: Any, labels_BS: Any, lengths: tuple[int, ...] | None) -> Any:
    """0.1 of the mean over layers of their losses: each is summed over what it predicts, and divided by all tokens."""
    import torch
    from torch.nn.functional import cross_entropy
    from transformers.cache_utils import DynamicCache

    total = 0.0
    for ids, labels in zip(
        *(t.split(list(lengths or [t.shape[1]]), dim=1) for t in (input_ids_BS, labels_BS)), strict=True
    ):
        hidden = hf.model(ids, use_cache=False).last_hidden_state
        for layer in range(len(mtp.layers)):
            ids, labels, hidden = ids[:, 1:], labels[:, 1:], hidden[:, :-1]
            positions = torch.arange(ids.shape[1])[None].expand_as(ids)
            hidden = mtp.forward_layer(layer, hidden, positions, DynamicCache(), input_ids=ids)
            logits = mtp.shared_head(hidden)
            total = total + cross_entropy(logits.transpose(1, 2), labels, reduction="sum")
    return 0.1 / len(mtp.layers) * total / input_ids_BS.numel()


def compare_with_megatrons_latent_attention(directory: Path, variant: str, layout: dict[str, Any]) -> Errors:
    """As `compare`, with Megatron's own class in place of `LatentSelfAttention`."""
    from megatron.core.transformer.multi_latent_attention import MLASelfAttention

    from mca_lib.models import layer_spec

    layer_spec.LatentSelfAttention = MLASelfAttention
    return compare(directory, [variant], layout)[variant]
