"""What the ranks of the export tests run."""

from pathlib import Path
from typing import Any

from tests.mca_lib.tiny_models import save_hf, token_ids


def make_source(directory: Path, variant: str, dtype: str = "bfloat16", **options: Any) -> None:
    """A directory as from a hub: weights, tokenizer, template, generation config, and a key of somebody's own."""
    import json

    save_hf(directory, variant, dtype, **options)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "my_own_key": {"kept": [1, None, "ü"]}}))
    (directory / "generation_config.json").write_text('{"eos_token_id": [2, 3], "temperature": 0.6}')
    (directory / "chat_template.jinja").write_text("{{ messages }}")
    write_tokenizer(directory)


def write_tokenizer(directory: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {c: i for i, c in enumerate(map(chr, range(32, 127)))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="?", eos_token="~").save_pretrained(directory)


def mix_dtypes(directory: Path) -> None:
    """Norms in fp32 among bf16 weights."""
    from safetensors.torch import load_file, save_file

    path = directory / "model.safetensors"
    tensors = {n: t.float() if "norm" in n else t for n, t in load_file(path).items()}
    save_file(tensors, path, metadata={"format": "pt"})


def add_redundant_head(directory: Path, same: bool) -> None:
    from safetensors.torch import load_file, save_file

    path = directory / "model.safetensors"
    tensors = load_file(path)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone() * (1 if same else 2)
    save_file(tensors, path, metadata={"format": "pt"})


def poison(directory: Path) -> None:
    """One NaN."""
    from safetensors.torch import load_file, save_file

    path = directory / "model.safetensors"
    tensors = load_file(path)
    tensors["model.norm.weight"][0] = float("nan")
    save_file(tensors, path, metadata={"format": "pt"})


def convert(source: Path, target: Path, limit: float = 1e-3) -> dict[str, Any]:
    """The job, in this process."""
    from mca_lib.converter.jobs import convert as job

    steps: list[tuple[int, int]] = []
    spec = {"model": str(source), "output": str(target), "max_logits_difference": limit}
    result = job(spec, lambda done, total, **_: steps.append((done, total)))
    assert steps[-1][0] == steps[-1][1] > 0
    return result


def convert_with_swapped_gate(source: Path, target: Path) -> dict[str, Any]:
    """With a weight table that is wrong and fits: gate and up have the same shape."""
    import dataclasses

    from mca_lib.converter.mappings import GatedMLP
    from mca_lib.models.registry import FAMILIES

    rows = FAMILIES["llama"].weights
    _set_weights(tuple(dataclasses.replace(m, hf=m.hf[::-1]) if isinstance(m, GatedMLP) else m for m in rows))
    return convert(source, target)


def convert_without_final_norm(source: Path, target: Path) -> dict[str, Any]:
    """With a weight table that takes the final norm for something that the model does not have."""
    from mca_lib.converter.mappings import Replicated
    from mca_lib.models.registry import FAMILIES

    rows = tuple(m for m in FAMILIES["llama"].weights if m.hf != ("model.norm.weight",))
    _set_weights((*rows, Replicated("decoder.extra.weight", "model.norm.weight", ("hidden_size",))))
    return convert(source, target)


def convert_with_a_row_too_many(source: Path, target: Path) -> dict[str, Any]:
    """With a table that has a row for which the model has no parameter."""
    from mca_lib.converter.mappings import Replicated
    from mca_lib.models.registry import FAMILIES

    extra = Replicated("decoder.extra.weight", "model.extra.weight", ("hidden_size",))
    _set_weights((*FAMILIES["llama"].weights, extra))
    return convert(source, target)


def _set_weights(rows: tuple[Any, ...]) -> None:
    """In this forked process only."""
    import dataclasses

    from mca_lib.models.registry import FAMILIES

    FAMILIES["llama"] = dataclasses.replace(FAMILIES["llama"], weights=rows)


def add_extra_tensor(directory: Path) -> None:
    from safetensors.torch import load_file, save_file

    path = directory / "model.safetensors"
    tensors = load_file(path)
    tensors["model.extra.weight"] = tensors["model.norm.weight"].clone()
    save_file(tensors, path, metadata={"format": "pt"})


def logits_of(directory: Path) -> Any:
    """transformers' logits of an exported directory, computed in its own dtype."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager").eval()
    with torch.no_grad():
        return model(token_ids()).logits.float().numpy()
