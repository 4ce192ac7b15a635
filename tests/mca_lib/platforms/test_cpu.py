"""The table of answered calls: each row works, is still needed, and dies with its reason."""

import importlib
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from mca_lib.platforms import cpu, current_platform, install

ROWS = [pytest.param(answer, id=answer.target) for answer in cpu.ANSWERS]


@pytest.fixture(scope="module")
def bare_process() -> dict[str, bool]:
    """target -> whether its probe holds in a process where nothing is installed."""
    code = """
import importlib, json, sys, torch
from mca_lib.platforms.cpu import ANSWERS
held = {}
for answer in ANSWERS:
    try:
        held[answer.target] = bool(eval(answer.probe, {"torch": torch, "m": importlib.import_module}))
    except Exception:
        held[answer.target] = False
print(json.dumps(held))
"""
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    out = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, env=env)
    assert out.returncode == 0, out.stderr
    return json.loads(out.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def held(ranks) -> dict[str, bool]:
    """target -> whether its probe holds after `install()`; in a rank, so that this process stays as it is."""
    return ranks(1, probe_all)[0]


def probe_all() -> dict[str, bool]:
    cpu.install()
    return {a.target: bool(eval(a.probe, {"torch": torch, "m": importlib.import_module})) for a in cpu.ANSWERS}


@pytest.mark.parametrize("answer", ROWS)
def test_answer_holds_after_install(answer, held):
    assert held[answer.target]


@pytest.mark.parametrize("answer", ROWS)
def test_answer_is_still_needed(answer, bare_process):
    assert not bare_process[answer.target], f"{answer.target} works without our answer now: remove the row"


@pytest.mark.parametrize("answer", ROWS)
def test_megatron_still_asks(answer):
    # Read, not imported: this process needs none of it.
    core = Path(importlib.util.find_spec("megatron.core").origin).parent
    path = core.joinpath(*answer.used_by.split(".")[2:])
    source = (path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text()
    assert answer.mark in source, f"{answer.used_by} no longer has {answer.mark!r}: is the row still needed?"


@pytest.mark.parametrize("answer", ROWS)
def test_row_gives_its_reason(answer):
    assert len(answer.reason.split()) > 3


def test_install_twice_patches_once(ranks):
    before, after = ranks(1, install_twice)[0]
    assert before == after


def install_twice() -> tuple[int, int]:
    install()
    before = id(torch.Tensor.type), id(torch.distributed.all_to_all_single)
    install()
    return hash(before), hash((id(torch.Tensor.type), id(torch.distributed.all_to_all_single)))


def dropout_draws() -> tuple[list[float], list[float]]:
    """Draws of this rank inside and outside of a tensor parallel region."""
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    from mca_lib.parallel import DistributingParallelArguments, initialize_model_parallel

    initialize_model_parallel(DistributingParallelArguments(tensor_model_parallel_size=2), seed=7)
    with get_cuda_rng_tracker().fork():
        inside = torch.rand(4).tolist()
    return inside, torch.rand(4).tolist()


def test_tensor_parallel_ranks_draw_apart_inside_and_alike_outside(ranks):
    (inside_0, outside_0), (inside_1, outside_1) = ranks(2, dropout_draws)
    assert inside_0 != inside_1
    assert outside_0 == outside_1


def test_platform_without_accelerator_is_cpu_with_gloo():
    platform = current_platform()
    expected = ("cuda", "nccl") if torch.cuda.is_available() else ("cpu", "gloo")
    assert (platform.device_type, platform.backend) == expected
    assert platform.peak_memory_bytes() > 0


def meta_devices() -> list[str]:
    install()
    with torch.device("meta"):
        return [t.device.type for t in (torch.tensor([1.0]), torch.empty(1), torch.zeros(1), torch.ones(1))]


def test_the_rest_of_the_process_keeps_torch_as_it_is(ranks):
    """transformers makes models on the meta device; a replaced factory would not be seen there."""
    assert ranks(1, meta_devices) == [["meta"] * 4]
