"""The LLaMA-Factory backend trains what Megatron-Core trains: the same rows, losses and gradient norms."""

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mca_lib.checkpoint.sealed import find_damage
from mca_lib.errors import ConfigError
from tests.mca_lib.trainers.preference_training import make_pair_store
from tests.mca_lib.trainers.training import HYPERPARAMETERS, make_store

STEPS = 6
# fp32; sums are taken in another order.
TOLERANCE = 1e-4


def make_small_model(directory: Path) -> Path:
    """With its tokenizer, which LLaMA-Factory wants to see. Its padding token, 0, is one of the stores' text."""
    from safetensors.torch import load_file, save_file

    from mca_lib.tiny_models import make_tiny_model

    shape = {"hidden_size": 32, "intermediate_size": 64, "head_dim": 8, "initializer_range": 0.1}
    make_tiny_model(directory, "llama", **shape)
    weights = load_file(directory / "model.safetensors")
    embedding = weights["model.embed_tokens.weight"]
    embedding[0] = embedding[1].flip(0)  # transformers begins with 0 there, of which a norm has no gradient
    save_file(weights, directory / "model.safetensors", {"format": "pt"})
    return directory


def run(folder: str, name: str, options: dict[str, Any]) -> list[dict[str, Any]]:
    """One rank of `run_train`; the lines of its log."""
    from mca_lib.run_train import main
    from mca_lib.trainers.progress import read_log

    out = Path(folder, name)
    out.mkdir(exist_ok=True)
    arguments = HYPERPARAMETERS | {"output_dir": str(out), "max_steps": STEPS, "save_strategy": "no"} | options
    arguments["save_steps"] = max(1, arguments["save_steps"])
    file = out / "arguments.json"
    file.write_text(json.dumps(arguments))
    main([str(file)])
    return read_log(out)


def history(lines: list[dict[str, Any]], names: tuple[str, ...] = ("loss", "grad_norm", "learning_rate")) -> np.ndarray:
    return np.array([[line[name] for name in names] for line in lines if "loss" in line])


@pytest.fixture(scope="module")
def folder(ranks, tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama_factory")
    ranks(1, make_small_model, folder / "model")
    for split, rows in (("train", 11), ("eval", 3)):  # an epoch is two steps of 4 and one of 3 rows
        make_store(folder / "store", rows, split=split)
        make_pair_store(folder / "pairs", rows, split=split)
    return folder


def options(folder: Path, stage: str, **changes: Any) -> dict[str, Any]:
    store = folder / ("pairs" if stage == "dpo" else "store")
    model = str(folder / "model")
    return {"model_name_or_path": model, "token_store": str(store), "stage": stage, "do_eval": True} | changes


@pytest.mark.parametrize(("stage", "world_size"), [("sft", 1), ("dpo", 2)])
def test_the_curves_are_those_of_megatron_core(ranks, folder, stage, world_size):
    wanted = options(folder, stage)
    ours, *_ = ranks(world_size, run, str(folder), f"mca {stage}", wanted)
    theirs, *_ = ranks(world_size, run, str(folder), f"llama-factory {stage}", wanted | {"use_mca": False})
    np.testing.assert_allclose(history(theirs), history(ours), rtol=TOLERANCE)
    assert theirs[-1]["eval_loss"] == pytest.approx(ours[-1]["eval_loss"], rel=TOLERANCE)


def run_until_sigterm(folder: str, name: str, options: dict[str, Any], step: int) -> int | str | None:
    """The same, with SIGTERM in the middle of a step, or in the evaluation after the last one; the exit status."""
    from mca_lib.trainers.llama_factory.record import Record

    original, evaluated = Record.on_step_begin, Record.evaluated

    def begin(self, *args, **kwargs):
        if self.step == step:
            os.kill(os.getpid(), signal.SIGTERM)
        original(self, *args, **kwargs)

    def evaluate(self, *args):
        if self.step == step:
            os.kill(os.getpid(), signal.SIGTERM)
        return evaluated(self, *args)

    Record.on_step_begin, Record.evaluated = begin, evaluate
    try:
        run(folder, name, options)
    except SystemExit as stopped:
        return stopped.code
    return 0


def test_a_stopped_run_goes_on_where_it_was(ranks, folder):
    """With adapters; a damaged checkpoint is not gone on from. The uninterrupted run is Megatron-Core's."""
    lora = options(folder, "sft", finetuning_type="lora", lora_target="all")
    ours, *_ = ranks(1, run, str(folder), "lora", lora)
    lora |= {"use_mca": False, "save_strategy": "steps", "save_steps": 2}
    assert ranks(1, run_until_sigterm, str(folder), "stopped", lora, 4) == [128 + signal.SIGTERM]
    stopped = folder / "stopped"
    assert sorted(path.name for path in stopped.glob("checkpoint-*")) == [
        "checkpoint-2",
        "checkpoint-4",
        "checkpoint-5",
    ]
    with open(stopped / "checkpoint-5" / "optimizer.pt", "r+b") as file:
        file.write(b"damage")
    theirs, *_ = ranks(1, run, str(folder), "stopped", lora)
    assert len(list(stopped.glob("damaged-checkpoint-5-*"))) == 1
    assert [line["step"] for line in theirs if "loss" in line] == list(range(1, STEPS + 1))
    np.testing.assert_allclose(history(theirs), history(ours), rtol=TOLERANCE)
    result = json.loads((stopped / "train_result.json").read_text())
    assert ranks(1, run_until_sigterm, str(folder), "stopped", lora, STEPS) == [128 + signal.SIGTERM]
    again = json.loads((stopped / "train_result.json").read_text())
    names = ("steps", "final_loss", "train_loss", "eval_loss", "seconds", "curves")
    assert [again[name] for name in names] == [result[name] for name in names], "no step is made again"
    assert find_damage(stopped / "final") is None
    settings = [json.loads((folder / name / "final/adapter_config.json").read_text()) for name in ("lora", "stopped")]
    assert settings[0] == settings[1]


def foreign_code() -> dict[str, Any]:
    """What the backend relies on, and what it mends."""
    import inspect

    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.loss.loss_utils import ForCausalLMLoss

    from mca_lib.trainers.llama_factory.backend import STAGES, dpo_trainer, dpo_workflow

    tiny = LlamaConfig(vocab_size=8, hidden_size=8, num_hidden_layers=1, num_attention_heads=1, pad_token_id=3)
    losses = inspect.getsource(dpo_trainer.CustomDPOTrainer.compute_preference_loss)
    return {
        "parameters": {stage: list(inspect.signature(found[0]).parameters) for stage, found in STAGES.items()},
        "own data": [hasattr(workflow, "get_dataset") for _, workflow, _, _ in STAGES.values()],
        "own trainer": [hasattr(home, name) for _, _, home, name in STAGES.values()],
        "late import": "from .trainer import CustomDPOTrainer" in inspect.getsource(dpo_workflow.run_dpo),
        "shift_labels": "shift_labels" in inspect.signature(ForCausalLMLoss).parameters,
        "name of the loss not passed": "self.dpo_loss(" in losses and "loss_type=" not in losses,
        "padding without gradient": LlamaForCausalLM(tiny).get_input_embeddings().padding_idx,
    }


def test_llama_factory_is_as_the_backend_knows_it(ranks):
    found, *_ = ranks(1, foreign_code)
    first = ["model_args", "data_args", "training_args", "finetuning_args"]
    assert found == {
        "parameters": {
            "pt": [*first, "callbacks"],
            "sft": [*first, "generating_args", "callbacks"],
            "dpo": [*first, "callbacks"],
        },
        "own data": [True] * 3,
        "own trainer": [True] * 3,
        "late import": True,
        "shift_labels": True,
        "name of the loss not passed": True,
        "padding without gradient": 3,
    }


def test_a_model_is_exported_anew_for_another_model_or_dtype(folder, tmp_path):
    from safetensors.torch import load_file

    from mca_lib.converter.stream import convert_hf
    from mca_lib.trainers.llama_factory.files import hugging_face_directory
    from tests.mca_lib.trainers.test_resume import change_weights

    change_weights(Path(shutil.copytree(folder / "model", tmp_path / "other")))
    starts = []
    for name, model in (("model", folder / "model"), ("other", tmp_path / "other")):
        convert_hf(model, tmp_path / f"mca {name}")
        starts += [(tmp_path / f"mca {name}", name, tmp_path, dtype) for dtype in ("float32", "bfloat16")]
    found = [hugging_face_directory(*start) for start in starts]
    assert [hugging_face_directory(*start) for start in starts] == found
    written = found[0] / "model.safetensors"
    whole = written.read_bytes()
    written.write_bytes(whole[:-1])
    hugging_face_directory(*starts[0])
    assert written.read_bytes() == whole, "a damaged one is not used"
    embeddings = [load_file(path / "model.safetensors")["model.embed_tokens.weight"] for path in found]
    assert len({(e.dtype, e.double().sum().item()) for e in embeddings}) == 4


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"moe_z_loss_coeff": 0.1}, "moe_z_loss_coeff=0.1 has no effect with use_mca=false"),
        ({"recompute_granularity": "selective"}, "use none or full"),
        ({"freeze": ["norm"]}, "freeze="),
    ],
)
def test_what_only_megatron_core_does_is_refused(changes, named):
    from mca_lib.trainers import Seq2SeqTrainingArguments
    from mca_lib.trainers.llama_factory import refuse_megatron_arguments

    with pytest.raises(ConfigError, match=named):
        refuse_megatron_arguments(Seq2SeqTrainingArguments(output_dir="out", **changes))


@pytest.mark.parametrize(
    ("part", "named"),
    [
        ({"mtp_num_layers": 1}, "multi-token"),
        ({"moe": object()}, "with experts"),
        ({"hybrid": object()}, "hybrid"),
        ({"vision": object()}, "see images"),
        ({"linear_attention_layers": (0,)}, "gated delta nets"),
        ({"attention_sinks": True}, "sinks"),
    ],
)
def test_a_model_that_would_lose_a_part_is_refused(part, named):
    from types import SimpleNamespace

    from mca_lib.trainers.llama_factory import check_model

    whole = {"mtp_num_layers": 0, "moe": None, "hybrid": None, "vision": None, "linear_attention_layers": ()}
    whole |= {"attention_sinks": False}
    with pytest.raises(ConfigError, match=named):
        check_model(SimpleNamespace(**whole | part), adapters=True)


def test_documents_that_would_rotate_as_a_longer_neighbour_are_refused():
    from mca_lib.models.registry import config_from_hf
    from mca_lib.trainers.llama_factory import check_longest
    from mca_lib.verification.tiny import tiny_config

    check_longest(config_from_hf(tiny_config("phi3")), 40)
    check_longest(config_from_hf(tiny_config("llama")), 41)
    with pytest.raises(ConfigError, match=r"dataset\.cutoff_len of at most 40 instead of 41"):
        check_longest(config_from_hf(tiny_config("phi3")), 41)
