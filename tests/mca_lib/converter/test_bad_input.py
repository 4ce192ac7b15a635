"""The convert job on directories that are broken: one clear line each, and nothing is left at the output."""

import json
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from mca_lib.converter.jobs import convert
from mca_lib.errors import ModelError
from tests.mca_lib.converter import llama_files

WEIGHTS = "model.safetensors"


def change_config(**changes: object) -> Callable[[Path], None]:
    def change(directory: Path) -> None:
        config = json.loads((directory / "config.json").read_text())
        (directory / "config.json").write_text(json.dumps({**config, **changes}))

    return change


def change_weights(change: Callable[[dict[str, torch.Tensor]], None]) -> Callable[[Path], None]:
    def rewrite(directory: Path) -> None:
        tensors = load_file(directory / WEIGHTS)
        change(tensors)
        save_file(tensors, directory / WEIGHTS, metadata={"format": "pt"})

    return rewrite


def set_value(name: str, value: float) -> Callable[[dict[str, torch.Tensor]], None]:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name].view(-1)[-1] = value

    return change


def truncate(directory: Path) -> None:
    data = (directory / WEIGHTS).read_bytes()
    (directory / WEIGHTS).write_bytes(data[:-10])


def overlap(directory: Path) -> None:
    """Two tensors that claim the same bytes: the size of the file is right."""
    data = (directory / WEIGHTS).read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    header["model.layers.1.input_layernorm.weight"]["data_offsets"] = header["model.layers.0.input_layernorm.weight"][
        "data_offsets"
    ]
    text = json.dumps(header, separators=(",", ":")).encode().ljust(length)
    assert len(text) == length
    (directory / WEIGHTS).write_bytes(data[:8] + text + data[8 + length :])


def lose_a_shard(directory: Path) -> None:
    config = json.loads((directory / "config.json").read_text())
    (directory / WEIGHTS).unlink()
    llama_files.make(directory, 40_000, **config)
    (directory / "model-00002-of-00006.safetensors").unlink()


def rewrite_as_pickle(directory: Path) -> None:
    """One that would run code when it is read."""

    class Code:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return (print, ("run",))

    (directory / WEIGHTS).unlink()
    with (directory / "pytorch_model.bin").open("wb") as file:
        pickle.dump({"model.norm.weight": Code()}, file)


def save_as_pickle(wrap: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    def change(directory: Path) -> None:
        tensors = load_file(directory / WEIGHTS)
        (directory / WEIGHTS).unlink()
        torch.save(wrap(tensors), directory / "pytorch_model.bin")

    return change


def tie_with_a_copy(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Path], None]:
    """A tied model that stores its output layer all the same, as `change` makes it of the embedding."""

    def rewrite(directory: Path) -> None:
        change_config(tie_word_embeddings=True)(directory)

        def store(tensors: dict[str, torch.Tensor]) -> None:
            tensors["model.embed_tokens.weight"].view(-1)[0] = 0.0
            tensors["lm_head.weight"] = change(tensors["model.embed_tokens.weight"].clone())

        change_weights(store)(directory)

    return rewrite


def with_signed_zero(tensor: torch.Tensor) -> torch.Tensor:
    tensor.view(-1)[0] = -0.0
    return tensor


COPY_DIFFERS = r"lm_head\.weight differs from model\.embed_tokens\.weight"


def add_adapter(directory: Path) -> None:
    """As PEFT's save_pretrained leaves it in the folder of its base."""
    (directory / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 4}))
    save_file({"base_model.model.x.lora_A.weight": torch.ones(4, 64)}, directory / "adapter_model.safetensors")


CASES: dict[str, tuple[Callable[[Path], None], str]] = {
    "truncated file": (truncate, r"model\.safetensors: not a whole safetensors file: it has \d+ bytes"),
    "overlapping tensors": (overlap, r"not a whole safetensors file: model\.layers\.\d\.\w+.* begins at byte"),
    "missing shard": (lose_a_shard, r"missing file model-00002-of-00006\.safetensors"),
    "missing tensor": (
        change_weights(lambda t: t.pop("model.norm.weight")),
        r"missing: model\.norm\.weight$",
    ),
    "extra tensor": (
        change_weights(lambda t: t.update({"model.layers.0.self_attn.sinks": torch.ones(4)})),
        r"not used by the model: model\.layers\.0\.self_attn\.sinks",
    ),
    "wrong dtype": (
        change_weights(lambda t: t.update({"model.norm.weight": t["model.norm.weight"].to(torch.int32)})),
        r"of an unsupported dtype: model\.norm\.weight \(int32\)",
    ),
    "wrong shape": (
        change_weights(lambda t: t.update({"model.norm.weight": torch.ones(65, dtype=torch.bfloat16)})),
        r"of the wrong shape: model\.norm\.weight \[65\], expected \[64\]",
    ),
    "mixed dtypes in one fused tensor": (
        change_weights(
            lambda t: t.update({n: t[n].float() for n in t if n.endswith("layers.1.self_attn.q_proj.weight")})
        ),
        r"mixed dtypes across one fused or stacked tensor: .*linear_qkv\.weight",
    ),
    "NaN": (
        change_weights(set_value("model.layers.2.mlp.up_proj.weight", float("nan"))),
        r"model\.safetensors: model\.layers\.2\.mlp\.up_proj\.weight holds NaN",
    ),
    "infinity": (
        change_weights(set_value("lm_head.weight", float("inf"))),
        r"model\.safetensors: lm_head\.weight holds NaN or an infinite value",
    ),
    "minus infinity": (
        change_weights(set_value("model.layers.0.self_attn.v_proj.weight", float("-inf"))),
        r"self_attn\.v_proj\.weight holds NaN or an infinite value",
    ),
    "unknown architecture": (change_config(model_type="gpt2"), r"gpt2"),
    "other head": (
        change_config(architectures=["LlamaForSequenceClassification"]),
        r"architectures=\['LlamaForSequenceClassification'\]",
    ),
    "code of its own": (change_config(auto_map={"AutoModel": "modeling.Model"}), r"auto_map=.*is not supported"),
    "pickle that runs code": (rewrite_as_pickle, r"pytorch_model\.bin: not a readable PyTorch checkpoint"),
    "pickle with a dictionary around the tensors": (
        save_as_pickle(lambda tensors: {"state_dict": tensors}),
        r"pytorch_model\.bin: 'state_dict' is dict, not a tensor; save the model's state_dict itself",
    ),
    "pickle of a list": (save_as_pickle(lambda tensors: list(tensors.values())), r"holds list, not names and tensors"),
    "stored copy with -0 for 0": (tie_with_a_copy(with_signed_zero), COPY_DIFFERS),
    "stored copy that is finer than its original": (tie_with_a_copy(lambda t: t.float() + 1e-6), COPY_DIFFERS),
    "stored copy of integers": (
        tie_with_a_copy(lambda t: t.to(torch.int32)),
        r"of an unsupported dtype: lm_head\.weight \(int32\)",
    ),
    "quantized": (change_config(quantization_config={"quant_method": "gptq"}), r"quant_method='gptq'"),
    "fewer layers in the config": (change_config(num_hidden_layers=2), r"not used by the model: model\.layers\.2"),
    "other weights for transformers": (
        change_config(transformers_weights="other.safetensors"),
        r"config\.json: transformers_weights='other\.safetensors' .* remove the key",
    ),
    "adapter beside the weights": (add_adapter, r"adapter_config\.json is there.* merge it"),
    "no config": (lambda directory: (directory / "config.json").unlink(), r"config\.json"),
}


@pytest.mark.parametrize("case", CASES)
def test_broken_model_is_one_clear_error_and_leaves_nothing(tmp_path: Path, case: str) -> None:
    damage, message = CASES[case]
    llama_files.make(tmp_path / "hf")
    damage(tmp_path / "hf")
    spec = {"model": str(tmp_path / "hf"), "output": str(tmp_path / "mca"), "max_logits_difference": None}
    with pytest.raises(ModelError, match=message) as error:
        convert(spec, lambda *args, **metrics: None)
    assert "\n" not in str(error.value)
    assert [p.name for p in tmp_path.iterdir()] == ["hf"]


def test_same_directory_undamaged_converts(tmp_path: Path) -> None:
    llama_files.make(tmp_path / "hf")
    spec = {"model": str(tmp_path / "hf"), "output": str(tmp_path / "mca"), "max_logits_difference": None}
    result = convert(spec, lambda *args, **metrics: None)
    assert result["logits"] is None
    assert (tmp_path / "mca" / "mca_config.json").is_file()
