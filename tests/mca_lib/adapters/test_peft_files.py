"""PEFT's files: what is written is what PEFT reads, and what cannot be merged is refused."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from mca_lib.adapters.peft_files import BASE_NAME, CONFIG_NAME, WEIGHTS_NAME, Adapter, peft_config, peft_name
from mca_lib.converter.export import export_hf
from mca_lib.converter.jobs import export
from mca_lib.converter.stream import convert_hf
from mca_lib.errors import CheckpointError
from mca_lib.models.config import McaModelConfig
from mca_lib.tiny_models import make_tiny_model
from tests.mca_lib.adapters.lora_ranks import lora_config
from tests.mca_lib.adapters.test_targets import config as config_of

MODULE = "model.layers.1.self_attn.q_proj"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("peft")
    make_tiny_model(folder / "hf", num_hidden_layers=2, dtype="bfloat16")
    convert_hf(folder / "hf", folder / "mca")
    return folder


@pytest.fixture
def adapter(folder, tmp_path) -> Path:
    """Of one module, written by hand."""
    rows, columns = load_file(folder / "hf" / "model.safetensors")[MODULE + ".weight"].shape
    values = torch.Generator().manual_seed(0)
    tensors = {
        peft_name(MODULE, "lora_A"): torch.randn(4, columns, generator=values) * 0.1,
        peft_name(MODULE, "lora_B"): torch.randn(rows, 4, generator=values) * 0.1,
    }
    save_file(tensors, tmp_path / WEIGHTS_NAME)
    settings = peft_config(McaModelConfig.from_pretrained(folder / "mca"), lora_config(target_modules=["q_proj"]))
    (tmp_path / CONFIG_NAME).write_text(json.dumps(settings))
    (tmp_path / BASE_NAME).write_text(json.dumps({"base": "a" * 64}))
    return tmp_path


def opened(folder: Path, adapter: Path, base: str | None = None) -> Adapter:
    return Adapter(adapter, McaModelConfig.from_pretrained(folder / "mca"), base)


@pytest.mark.parametrize("dtype", ["auto", "float32"])
def test_weights_are_merged_in_fp32_and_cast_once(folder, adapter, tmp_path, dtype):
    export_hf(folder / "mca", tmp_path / "merged", dtype=dtype, adapter=opened(folder, adapter, "a" * 64))
    before, after = (load_file(d / "model.safetensors") for d in (folder / "hf", tmp_path / "merged"))
    A, B = (load_file(adapter / WEIGHTS_NAME)[peft_name(MODULE, matrix)] for matrix in ("lora_A", "lora_B"))
    expected = before[MODULE + ".weight"].float() + (B @ A) * 1.5
    target = torch.bfloat16 if dtype == "auto" else torch.float32
    assert torch.equal(after.pop(MODULE + ".weight"), expected.to(target))
    assert all(torch.equal(tensor, before[name].to(target)) for name, tensor in after.items())


@pytest.mark.parametrize(
    ("lora", "merged", "inside"), [("merged", True, False), ("adapter", False, False), ("both", True, True)]
)
def test_the_job_writes_what_is_asked_for(folder, adapter, tmp_path, lora, merged, inside):
    spec = {"checkpoint": str(folder / "mca"), "output": str(tmp_path / "out"), "adapter": str(adapter), "lora": lora}
    result = export(spec, lambda done, total, **_: None)
    names = {str(p.relative_to(tmp_path / "out")) for p in (tmp_path / "out").rglob("*") if p.is_file()}
    assert set(result["files"]) == names
    assert ("model.safetensors" in names, "adapter/adapter_config.json" in names) == (merged, inside)
    assert (CONFIG_NAME in names) == (lora == "adapter")
    assert "tokenizer.json" in names


def broken(adapter: Path, name: str, value: torch.Tensor | None) -> None:
    tensors = load_file(adapter / WEIGHTS_NAME)
    tensors.pop(name, None)
    save_file(tensors | ({} if value is None else {name: value}), adapter / WEIGHTS_NAME)


DAMAGE = {
    "a missing matrix": (
        lambda a: broken(a, peft_name(MODULE, "lora_B"), None), r"q_proj.lora_B.weight is missing"),
    "a wrong shape": (
        lambda a: broken(a, peft_name(MODULE, "lora_A"), torch.zeros(4, 3)), r"\[4, 3\]: \[4, \d+\] is expected"),
    "NaN": (
        lambda a: broken(a, peft_name(MODULE, "lora_A"), load_file(a / WEIGHTS_NAME)[peft_name(MODULE, "lora_A")] * float("nan")),  # noqa: E501
        "holds NaN"),
    "a foreign module": (
        lambda a: broken(a, peft_name("model.layers.9.self_attn.q_proj", "lora_A"), torch.zeros(4, 3)),
        "the model has no such module"),
    "a cut file": (
        lambda a: (a / WEIGHTS_NAME).write_bytes((a / WEIGHTS_NAME).read_bytes()[:-8]), "cannot be read"),
    "no configuration": (lambda a: (a / CONFIG_NAME).unlink(), "adapter_config.json: not readable"),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_adapter_is_one_clear_error(folder, adapter, damage):
    make, named = DAMAGE[damage]
    make(adapter)
    with pytest.raises(CheckpointError, match=named) as caught:
        opened(folder, adapter)
    assert "\n" not in str(caught.value)


def test_an_adapter_of_another_base_is_refused(folder, adapter):
    with pytest.raises(CheckpointError, match=r"was trained on a model with the digest a{16}, this one has b{16}"):
        opened(folder, adapter, "b" * 64)


def test_the_configuration_is_pefts_and_says_what_has_an_adapter():
    dense = peft_config(config_of("llama"), lora_config(lora_dropout=0.1))
    assert (dense["peft_type"], dense["task_type"], dense["r"], dense["lora_dropout"]) == ("LORA", "CAUSAL_LM", 4, 0.1)
    assert dense["target_modules"] == [
        "down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj",
    ]  # fmt: skip
    one = peft_config(config_of("llama"), lora_config(target_modules=["layers.2.self_attn.o_proj", "v_proj"]))
    assert one["target_modules"] == ["2.self_attn.o_proj", "v_proj"]
    attention = peft_config(config_of("deepseek-mtp"), lora_config(target_modules=["kv_b_proj"]))
    assert (attention["target_modules"], attention["target_parameters"]) == (["kv_b_proj"], None)


@pytest.mark.parametrize(("rslora", "alpha"), [(False, 12), (True, 6 * 2**0.5)])
def test_experts_are_named_as_the_two_tensors_that_transformers_holds(rslora, alpha):
    """Gate and up are one of twice the rank, whose factor must be that of each."""
    settings = peft_config(config_of("qwen3-moe-mixed"), lora_config(use_rslora=rslora, lora_dropout=0.1))
    assert settings["target_modules"] == ["k_proj", "o_proj", "q_proj", "v_proj"]
    assert {"experts.down_proj", "experts.gate_up_proj"} < set(settings["target_parameters"])
    assert len(settings["target_parameters"]) == 5
    assert (settings["rank_pattern"], settings["alpha_pattern"]) == (
        {r".*\.gate_up_proj": 8}, {r".*\.gate_up_proj": pytest.approx(alpha)},
    )  # fmt: skip
    assert settings["lora_dropout"] == 0.0, "PEFT has none on parameters"


def test_peft_still_takes_every_mlp_for_experts_and_has_no_dropout_on_parameters():
    """Why dense layers beside experts are named as parameters. When this fails, name them as modules."""
    import inspect

    from peft.tuners.lora.layer import ParamWrapper
    from peft.utils.transformers_weight_conversion import _MOE_TARGET_MODULE_MAPPING, _convert_peft_config_moe

    assert {"gate_proj", "up_proj", "down_proj"} <= _MOE_TARGET_MODULE_MAPPING["qwen2_moe"].keys()
    assert 'target.endswith(f".{old_name}")' in inspect.getsource(_convert_peft_config_moe)
    assert "lora_dropout" in inspect.getsource(ParamWrapper)
