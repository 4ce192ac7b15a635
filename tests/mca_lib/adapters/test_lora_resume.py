"""A training of adapters that was killed goes on from a checkpoint of the adapters alone, on the same model."""

import filecmp
import signal
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from mca_lib.adapters.peft_files import WEIGHTS_NAME, Adapter
from mca_lib.checkpoint.reader import CheckpointReader
from mca_lib.errors import CheckpointError
from mca_lib.models.config import McaModelConfig
from tests.mca_lib.adapters.lora_ranks import train_lora
from tests.mca_lib.adapters.test_lora import SEQUENCE, assert_same_adapter
from tests.mca_lib.checkpoint.expert_ranks import make_sources
from tests.mca_lib.tiny_models import save_hf
from tests.mca_lib.trainers.training import history, kill_in_step, make_store
from tests.ranks import RankError

OPTIONS = {"max_steps": 6, "save_steps": 2, "save_total_limit": 2}
DROPOUT = {"lora_dropout": 0.2}


def train_until(model: str, store: str, out: str, options: dict[str, Any], lora: dict[str, Any], step: int) -> None:
    kill_in_step(step, signal.SIGKILL)
    train_lora(model, store, out, options, lora)


def save_another_llama(directory: Path) -> None:
    save_hf(directory, "llama", initializer_range=0.1)


@pytest.fixture(scope="module")
def folder(ranks, tmp_path_factory):
    folder = tmp_path_factory.mktemp("lora-resume")
    ranks(1, make_sources, folder, ["llama", "qwen3-moe"], "float32")
    make_store(folder / "store", rows=18)
    return folder


@pytest.mark.parametrize(
    ("variant", "options"),
    [("llama", {"pipeline_model_parallel_size": 2, "bf16": True}), ("qwen3-moe", SEQUENCE)],
    ids=["PP2 bf16", "experts TP2 SP"],
)
def test_killed_and_resumed_is_the_same_bytes(ranks, folder, variant, options):
    places, stem = (f"{folder}/{variant}", f"{folder}/store"), folder / f"{variant} {'-'.join(options)}"
    options = {**OPTIONS, "async_save": True, **options}
    whole, broken = f"{stem} whole", f"{stem} broken"
    uninterrupted = ranks(2, train_lora, *places, whole, options, DROPOUT)
    with pytest.raises(RankError, match="exit -9"):
        ranks(2, train_until, *places, broken, options, DROPOUT, 5)
    resumed = ranks(2, train_lora, *places, broken, options, DROPOUT)
    assert (history(resumed) == history(uninterrupted)).all()
    assert filecmp.cmp(f"{whole}/final/{WEIGHTS_NAME}", f"{broken}/final/{WEIGHTS_NAME}", shallow=False)


@pytest.fixture(scope="module")
def killed(ranks, folder):
    """Output of a training on two tensor parallel ranks, killed in step 5."""
    out, options = folder / "killed", {**OPTIONS, "tensor_model_parallel_size": 2}
    with pytest.raises(RankError, match="exit -9"):
        ranks(2, train_until, f"{folder}/llama", f"{folder}/store", str(out), options, {}, 5)
    return out


def test_a_checkpoint_holds_the_adapters_and_their_moments_alone(killed):
    stored = CheckpointReader(killed / "checkpoint-4" / "state").stored
    assert stored
    assert all(".lora_A.weight" in name or ".lora_B.weight" in name for name in stored)
    assert {name.partition("base_model.")[0] for name in stored} >= {"", "optimizer.state.exp_avg."}


def test_another_base_is_refused(ranks, folder, killed):
    ranks(1, save_another_llama, folder / "other")
    with pytest.raises(RankError, match=r"CheckpointError: .*checkpoint-4 was made with base model='\w+', this run"):
        ranks(2, train_lora, f"{folder}/other", f"{folder}/store", str(killed), {**OPTIONS}, {})


def test_another_rank_of_the_adapters_is_refused(ranks, folder, killed):
    with pytest.raises(RankError, match=r"CheckpointError: .*checkpoint-4 was made with lora r=4, this run has 8"):
        ranks(2, train_lora, f"{folder}/llama", f"{folder}/store", str(killed), {**OPTIONS}, {"r": 8})


def test_it_goes_on_at_another_layout(ranks, folder, killed):
    places = f"{folder}/llama", f"{folder}/store"
    resumed = ranks(2, train_lora, *places, str(killed), {**OPTIONS, "pipeline_model_parallel_size": 2}, {})
    straight = ranks(1, train_lora, *places, f"{folder}/straight", OPTIONS, {})
    assert abs(history(resumed) / history(straight) - 1).max() < 1e-5
    adapters = [load_file(f"{out}/final/{WEIGHTS_NAME}") for out in (killed, folder / "straight")]
    assert_same_adapter(*adapters)
    _check_the_final_adapter(folder, killed / "final")


def _check_the_final_adapter(folder, adapter) -> None:
    """It knows its base, and what it cannot be merged into."""
    llama = McaModelConfig.from_pretrained(folder / "llama")
    assert len(Adapter(adapter, llama).weights) == 28
    with pytest.raises(CheckpointError, match=r"was trained on a model with the digest \w{16}, this one has xxxx"):
        Adapter(adapter, llama, base="x" * 64)
    with pytest.raises(CheckpointError, match="the model has no such module"):
        Adapter(adapter, McaModelConfig.from_pretrained(folder / "qwen3-moe"))
