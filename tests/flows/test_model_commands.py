"""mcaflow convert, export, inspect, verify-model: what they print, what they leave, and how they fail."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from safetensors import safe_open

from mca_lib.tiny_models import make_tiny_model
from mca_lib.verification.card import read_card
from mca_lib.verification.full_size_configs import CONFIGS
from tests.mca_lib.tiny_models import save_hf

ROOT = Path(__file__).parents[2]


def command(*arguments: str | Path) -> list[str]:
    return [sys.executable, "-m", "flows.cli", *map(str, arguments)]


def environment(folder: Path) -> dict[str, str]:
    temporary = folder / "tmp"
    temporary.mkdir(exist_ok=True)
    return os.environ | {"COLUMNS": "200", "PYTHONPATH": str(ROOT), "TMPDIR": str(temporary)}


def mcaflow(folder: Path, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(*arguments), cwd=folder, env=environment(folder), capture_output=True, text=True)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny") / "model", "llama", num_hidden_layers=2, dtype="bfloat16")


@pytest.fixture
def model(tiny: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny, tmp_path / "model"))


def tensors(model: Path) -> dict[str, Any]:
    with safe_open(model / "model.safetensors", framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def test_there_and_back_is_the_same_model(model: Path, tmp_path: Path) -> None:
    converted = mcaflow(tmp_path, "convert", model, "checkpoint", "--check")
    assert converted.returncode == 0, converted.stderr
    doing = ["convert model", "  computing the logits", "  writing and checking", "  loading what was written"]
    assert [a.startswith(b) for a, b in zip(converted.stderr.splitlines(), doing, strict=True)] == [True] * 4
    assert "checkpoint: " in converted.stdout
    assert "fp32 logits differ from transformers' by at most" in converted.stdout
    exported = mcaflow(tmp_path, "export", "checkpoint", "back")
    assert exported.returncode == 0, exported.stderr
    before, after = tensors(model), tensors(tmp_path / "back")
    assert before.keys() == after.keys()
    assert all(before[name].equal(after[name]) and before[name].dtype == after[name].dtype for name in before)
    assert (tmp_path / "back" / "tokenizer.json").is_file()
    assert os.listdir(tmp_path / "tmp") == []


BAD: dict[str, tuple[list[str], str]] = {
    "convert nothing": (["convert", "nowhere", "out"], "nowhere: no such directory"),
    "convert over something": (["convert", "model", "model"], "model"),
    "convert an unknown model": (["convert", "gpt2", "out"], "model_type='gpt2'"),
    "export what is no checkpoint": (["export", "model", "out"], "no mca_config.json"),
    "inspect nothing": (["inspect", "nowhere"], "nowhere: no such file or directory"),
    "inspect an unknown model": (["inspect", "gpt2"], "model_type='gpt2'"),
    "inspect with another precision": (["inspect", "model", "--precision", "int3"], "--precision int3"),
    "inspect with ranks that do not fit": (
        ["inspect", "model", "--virtual-pipeline", "2"],
        "--virtual-pipeline: 2 needs --pipeline",
    ),
    "inspect with both": (["inspect", "model", "--ranks", "2", "--data", "2"], "--ranks and --data"),
    "convert what is not whole": (["convert", "cut", "out"], "cut/model.safetensors"),
    "verify what is not whole": (["verify-model", "cut"], "cut/model.safetensors"),
    "generate without a tokenizer": (["verify-model", "bare", "--generate"], "no tokenizer"),
    "inspect with a layout that does not fit": (
        ["inspect", "model", "--tensor", "3"],
        "--tensor=3 does not divide the model's 4 attention heads",
    ),
    "inspect with an uneven pipeline": (
        ["inspect", "model", "--pipeline", "2", "--first-stage-layers", "2"],
        "--first-stage-layers=2 leave 0 of the model's 2 layers",
    ),
    "verify nothing": (["verify-model", "nowhere"], "nowhere: no such directory"),
    "verify at no layout": (["verify-model", "model", "--layouts", "TP2,QP3"], "'QP3'"),
    "verify with no limit": (["verify-model", "model", "--max-kl", "0"], "--max-kl 0"),
    "verify an unknown model": (["verify-model", "gpt2"], "model_type='gpt2'"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_mistake_is_one_line_and_exit_code_2(model: Path, tmp_path: Path, case: str) -> None:
    shutil.copytree(model, tmp_path / "gpt2")
    config = json.loads((model / "config.json").read_text())
    (tmp_path / "gpt2" / "config.json").write_text(json.dumps(config | {"model_type": "gpt2"}))
    shutil.copytree(model, tmp_path / "cut")
    os.truncate(tmp_path / "cut" / "model.safetensors", 5000)
    shutil.copytree(model, tmp_path / "bare", ignore=shutil.ignore_patterns("tokenizer*"))
    arguments, message = BAD[case]
    run = mcaflow(tmp_path, *arguments)
    assert run.returncode == 2, run.stderr
    assert message in run.stderr
    *doing, last = run.stderr.splitlines()
    assert last.startswith("mcaflow: error: ")
    assert not any("rror" in line for line in doing)
    assert run.stdout == ""
    assert not (tmp_path / "out").exists()
    assert os.listdir(tmp_path / "tmp") == []


def test_inspect_knows_a_model_by_its_config_alone(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["DeepSeek-V3"]))
    run = mcaflow(tmp_path, "inspect", "config.json", "--json", "--expert", "64", "--expert-tensor", "1")
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout)
    assert found["parameters"]["total"] - found["parameters"]["mtp"] == 671_026_419_200
    assert found["active_parameters"] == 37_552_297_472
    assert (found["ranks"], found["refused"], len(found["stages"])) == (64, None, 1)
    parts = ("weights", "gradients", "optimizer", "activations")
    assert found["stages"][0]["total"] == sum(found["stages"][0][name] for name in parts)


def test_a_refused_layout_is_said_in_json_too(model: Path, tmp_path: Path) -> None:
    run = mcaflow(tmp_path, "inspect", model, "--tensor", "3", "--json")
    assert run.returncode == 2
    assert json.loads(run.stdout)["refused"].startswith("--tensor=3 does not divide")


def test_inspect_cuts_no_number_however_narrow_the_terminal_is(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["DeepSeek-V3"]))
    run = subprocess.run(
        command("inspect", "config.json", "--expert", "64", "--expert-tensor", "1"),
        cwd=tmp_path,
        env=environment(tmp_path) | {"COLUMNS": "40"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    assert "37,552,297,472" in run.stdout
    assert "…" not in run.stdout
    assert "balancing" in run.stdout


def test_layers_that_the_files_do_not_have_are_not_counted_and_said(tmp_path: Path) -> None:
    """transformers drops multi-token prediction layers when it loads, and still counts one when it saves."""
    model = save_hf(tmp_path / "model", "deepseek-yarn")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
    found = mcaflow(tmp_path, "inspect", model)
    assert "without the 1 multi-token prediction layers that config.json counts" in " ".join(found.stdout.split())
    assert json.loads(mcaflow(tmp_path, "inspect", model, "--json").stdout)["parameters"]["mtp"] == 0
    converted = mcaflow(tmp_path, "convert", model, "out")
    assert converted.returncode == 0, converted.stderr
    assert "config.json counts 1 multi-token prediction layer and the files have none" in converted.stderr


def test_inspect_looks_at_the_headers_of_the_weights(model: Path, tmp_path: Path) -> None:
    assert "1 file, complete by the headers" in mcaflow(tmp_path, "inspect", model).stdout
    os.truncate(model / "model.safetensors", 5000)
    run = mcaflow(tmp_path, "inspect", model)
    assert (run.returncode, len(run.stderr.splitlines())) == (2, 1)
    assert "model.safetensors" in run.stderr


def test_inspect_says_why_weights_cannot_be_used(model: Path, tmp_path: Path) -> None:
    (model / "adapter_config.json").write_text("{}")
    inspected = mcaflow(tmp_path, "inspect", model)
    assert inspected.returncode == 0, inspected.stderr
    assert "adapter_config.json" in inspected.stdout


def test_verify_model_writes_a_card_and_its_exit_code_is_the_verdict(model: Path, tmp_path: Path) -> None:
    arguments = ["verify-model", model, "--layouts", "TP2", "--generate", "--output", "cards/model.md"]
    run = mcaflow(tmp_path, *arguments)
    assert run.returncode == 0, run.stderr
    assert "verified: at every layout that was measured" in run.stdout
    assert "5 of 5 identical over 32 tokens" in run.stdout
    card = read_card(tmp_path / "cards" / "model.md")
    assert card.verdict() == "verified"
    assert [r.layout for r in card.layouts] == ["TP2"]
    tight = mcaflow(tmp_path, "verify-model", model, "--layouts", "one rank", "--max-difference", "1e-9")
    assert tight.returncode == 1
    assert "not verified: one rank: max |Δ|" in tight.stderr
    blunt = mcaflow(
        tmp_path, "verify-model", model, "--layouts", "one rank", "--max-difference", "1e3", "--max-kl", "9"
    )
    assert blunt.returncode == 3
    assert "mcaflow: inconclusive: nothing differs" in blunt.stderr
    assert os.listdir(tmp_path / "tmp") == []


def test_verify_model_that_is_killed_leaves_no_process(model: Path, tmp_path: Path) -> None:
    env = environment(tmp_path)
    run = subprocess.Popen(command("verify-model", model), cwd=tmp_path, env=env, stderr=subprocess.DEVNULL)
    family: list[psutil.Process] = []
    try:
        while len(family) < 4:  # the guardian, the job, the pool's server, and a rank at work
            assert run.poll() is None
            time.sleep(0.05)
            family = psutil.Process(run.pid).children(recursive=True)
    finally:
        run.send_signal(signal.SIGKILL)
        run.wait()
    assert psutil.wait_procs(family, timeout=60)[1] == []


def test_convert_that_is_terminated_leaves_nothing(model: Path, tmp_path: Path) -> None:
    run = subprocess.Popen(command("convert", model, "out", "--check"), cwd=tmp_path, env=environment(tmp_path))
    try:
        while not list(tmp_path.glob("out-partial-*")):  # the job has begun to write
            assert run.poll() is None
            time.sleep(0.01)
    finally:
        run.terminate()
    assert run.wait() in (0, 143)  # it may have been at its end
    assert list(tmp_path.glob("out-partial-*")) == []
    assert os.listdir(tmp_path / "tmp") == []
