"""What the ranks of the model factory's tests run."""

from pathlib import Path
from typing import Any

from tests.mca_lib.models.layouts import layout_args
from tests.mca_lib.tiny_models import token_ids


def start(**layout: Any) -> Any:
    from mca_lib.parallel import initialize_model_parallel

    args = layout_args(**layout)
    initialize_model_parallel(args)
    return args


def set_weight(directory: Path, name: str, value: float) -> None:
    """Set one element of a Hugging Face tensor."""
    from safetensors.torch import load_file, save_file

    path = directory / "model.safetensors"
    tensors = load_file(path)
    tensors[name].view(-1)[-1] = value
    save_file(tensors, path, metadata={"format": "pt"})


def save_at(layout: dict[str, Any], source: Path, target: Path) -> None:
    """Load a Hugging Face directory at a layout and save it as an MCA checkpoint."""
    from mca_lib.models import AutoModel

    args = start(**layout)
    AutoModel.from_pretrained(source, args).save_pretrained(target)


def save_with_a_file_size_limit(source: Path, target: Path) -> None:
    """As on a disk that fills up: writing fails in the middle of a file."""
    import resource
    import signal

    from mca_lib.models import AutoModel

    models = AutoModel.from_pretrained(source, start())
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
    models.save_pretrained(target)


def export_at(layout: dict[str, Any], source: Path, target: Path, **options: Any) -> None:
    from mca_lib.models import AutoModel

    args = start(**layout)
    AutoModel.from_pretrained(source, args).save_pretrained_as_hf(target, **options)


def save_adapters_at(layout: dict[str, Any], source: Path, target: Path) -> None:
    from peft import LoraConfig

    from mca_lib.adapters import apply_megatron_lora
    from mca_lib.models import AutoModel

    models = AutoModel.from_pretrained(source, start(**layout))
    apply_megatron_lora(models, LoraConfig(r=2, target_modules=["all-linear"], task_type="CAUSAL_LM"), 0)
    models.save_pretrained(target)


def parameters_at(layout: dict[str, Any], directory: Path) -> dict[str, Any]:
    """Names → values of this rank, fp32 arrays (a tensor that Megatron pickles needs Megatron to be unpickled)."""
    from mca_lib.models import AutoModel

    models = AutoModel.from_pretrained(directory, start(**layout))
    return {n: p.detach().float().numpy() for n, p in models.named_parameters()}


def same_from_both_formats(layout: dict[str, Any], hf: Path, mca: Path) -> tuple[bool, int]:
    """(Are all parameters of this rank the same bytes, loaded from either directory; how many)."""
    import torch

    from mca_lib.models import AutoModel

    args = start(**layout)
    a, b = (dict(AutoModel.from_pretrained(d, args).named_parameters()) for d in (hf, mca))
    same = all(torch.equal(a[n], b[n]) and a[n].dtype == b[n].dtype for n in a)
    return same and a.keys() == b.keys(), len(a)


def dtypes_at(directory: Path, bf16: bool) -> set[str]:
    from mca_lib.models import AutoModel

    return {str(p.dtype) for p in AutoModel.from_pretrained(directory, start(bf16=bf16)).parameters()}


def random_checkpoint(layout: dict[str, Any], hf: Path, target: Path) -> None:
    """A model with random weights, saved."""
    from mca_lib.models import AutoConfig, AutoModel

    args = start(**layout)
    AutoModel.from_config(AutoConfig.from_pretrained(hf), args).save_pretrained(target)


def state_dict_round_trip(layout: dict[str, Any], directory: Path) -> tuple[list[str], bool]:
    """(Keys of the state dict, does it restore the weights)."""
    import torch

    from mca_lib.models import AutoModel

    models = AutoModel.from_pretrained(directory, start(**layout))
    state = {k: {n: t.clone() for n, t in v.items() if t is not None} for k, v in models.state_dict().items()}
    before = [p.detach().clone() for p in models.parameters()]
    for parameter in models.parameters():
        parameter.data.zero_()
    models.load_state_dict(state)
    restored = all(torch.equal(a, b) for a, b in zip(before, models.parameters(), strict=True))
    sharded = models.sharded_state_dict()
    return sorted(state), restored and sorted(sharded) == sorted(state)


def documents_are_independent(directory: Path) -> tuple[bool, bool]:
    """(Is document B bitwise the same whatever A holds, and wherever it lies in the row; does A itself change?)"""
    import torch

    from mca_lib.models import AutoModel
    from tests.mca_lib.models.parity_ranks import packed_params

    model = AutoModel.from_pretrained(directory, start()).eval()[0]
    a, other, b = token_ids(1, 12, seed=1), token_ids(1, 12, seed=2), token_ids(1, 9, seed=3)

    def logits(*documents: Any) -> list[Any]:
        lengths = tuple(d.shape[1] for d in documents)
        ids = torch.cat(documents, dim=1)
        with torch.no_grad():
            out = model(ids, torch.arange(ids.shape[1])[None], packed_seq_params=packed_params(lengths))
        return list(out.split(lengths, dim=1))

    first, second, turned = logits(a, b), logits(other, b), logits(b, a)
    same = torch.equal(first[1], second[1]) and torch.equal(first[1], turned[0])
    return same, torch.equal(first[0], second[0])


def trailing_padding_changes_nothing(directory: Path) -> float:
    """Largest |Δ| of a document's logits when the row goes on beyond `cu_seqlens`."""
    import torch

    from mca_lib.models import AutoModel
    from tests.mca_lib.models.parity_ranks import packed_params

    model = AutoModel.from_pretrained(directory, start()).eval()[0]
    ids = token_ids(1, 20)
    with torch.no_grad():
        out = model(ids, torch.arange(20)[None], packed_seq_params=packed_params((7, 8)))
        alone = model(ids[:, 7:15], torch.arange(8)[None])
    return (out[:, 7:15] - alone).abs().max().item()


def attention_dropout(directory: Path) -> tuple[bool, bool, bool]:
    """Two tensor parallel ranks in training mode: is a pass random, is its loss the same on both ranks, and does each
    rank drop other attention weights than its neighbour?"""
    import torch
    import torch.distributed as dist

    from mca_lib.models import AutoModel

    model = AutoModel.from_pretrained(directory, start(tensor=2))[0].train()
    ids = token_ids(1, 16)
    generator = torch.Generator().manual_seed(0)
    query_SBND = torch.randn(16, 1, 2, 8, generator=generator)
    with torch.no_grad():
        one, two = (model(ids, torch.arange(16)[None], labels=ids) for _ in range(2))
        attention = model.decoder.layers[0].self_attention.core_attention
        context = attention(query_SBND, query_SBND, query_SBND)

    def same_on_both(value: Any) -> bool:
        values = [torch.empty_like(value) for _ in range(2)]
        dist.all_gather(values, value.contiguous())
        return torch.equal(*values)

    return not torch.equal(one, two), same_on_both(one), not same_on_both(context)


def residual_dropout(directory: Path) -> tuple[bool, bool, bool]:
    """Two tensor parallel ranks in training mode: is a pass random, is its loss the same on both ranks, and are
    embeddings whole?"""
    import torch
    import torch.distributed as dist

    from mca_lib.models import AutoModel

    model = AutoModel.from_pretrained(directory, start(tensor=2))[0].train()
    ids, positions = token_ids(1, 16), torch.arange(16)[None]
    with torch.no_grad():
        one, two = (model(ids, positions, labels=ids) for _ in range(2))
        embedded = [model.train(mode).embedding(ids, positions) for mode in (True, False)]
    losses = [torch.empty_like(one) for _ in range(2)]
    dist.all_gather(losses, one.contiguous())
    return not torch.equal(one, two), torch.equal(*losses), torch.equal(*embedded)


def recompute_changes_nothing(directory: Path, granularity: str) -> float:
    """Largest |Δ| of gradients between no recomputation and `granularity`."""
    from mca_lib.models import AutoModel

    args, gradients = start(), []
    import torch

    for value in ("none", granularity):
        args.recompute_granularity = value
        model = AutoModel.from_pretrained(directory, args).train()[0]
        ids = token_ids(2, 16)
        model(ids, torch.arange(16).expand(2, 16), labels=ids).sum().backward()
        gradients.append([p.grad for p in model.parameters()])
    return max((a - b).abs().max().item() for a, b in zip(*gradients, strict=True))


def described(layout: dict[str, Any], directory: Path) -> tuple[str, str]:
    """(repr of the models, what calling them says)."""
    from mca_lib.models import AutoModel

    models = AutoModel.from_pretrained(directory, start(**layout))
    try:
        models(token_ids())
    except TypeError as error:
        return repr(models), str(error)
    raise AssertionError("it was called")


def error_of_base_digest(checkpoint: Path) -> str:
    """What this rank gets of the digest of a damaged checkpoint."""
    from mca_lib.checkpoint.base import base_digest
    from mca_lib.errors import CheckpointError

    start()
    try:
        return base_digest(checkpoint)
    except CheckpointError as error:
        return str(error)


def errors_of_saving(layout: dict[str, Any], source: Path, folder: Path) -> list[str]:
    """What this rank gets of saving into `folder / full`, exporting there, and exporting below a file."""
    from mca_lib.models import AutoModel

    models = AutoModel.from_pretrained(source, start(**layout))
    errors = []
    for write, target in (
        (models.save_pretrained, folder / "full"),
        (models.save_pretrained_as_hf, folder / "full"),
        (models.save_pretrained_as_hf, folder / "file" / "below"),
    ):
        try:
            write(target)
        except Exception as error:
            errors.append(f"{type(error).__name__}: {error}")
    return errors


def cp_slices(
    layout: dict[str, Any], directory: Path, lengths: tuple[int, ...] | None, tokens: int, labels: int | None = None
) -> Any:
    """Token positions that this rank gets, and a value that passes through."""
    import torch

    from mca_lib.models import AutoModel
    from tests.mca_lib.models.parity_ranks import packed_params

    models = AutoModel.from_pretrained(directory, start(**layout))
    batch = {"input_ids": torch.arange(tokens)[None], "note": "kept", "attention_mask": None}
    batch |= {} if labels is None else {"labels": torch.arange(labels)[None]}
    cut = models.get_batch_on_this_cp_rank(batch, packed_params(lengths) if lengths else None)
    return cut["input_ids"][0].tolist(), cut["note"]


def load_without_process_groups(directory: Path) -> None:
    from mca_lib.models import AutoModel

    AutoModel.from_pretrained(directory)


def train_a_little(directory: Path, target: Path) -> None:
    """Change every weight, then save: what an export has to carry."""
    import torch

    from mca_lib.models import AutoModel

    models = AutoModel.from_pretrained(directory, start())
    with torch.no_grad():
        for parameter in models.parameters():
            parameter.mul_(1.5)
    models.save_pretrained(target)
