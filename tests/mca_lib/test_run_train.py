"""run_train's own part: arguments in, the right refusal out, and word for the launcher when a rank fails."""

import json
import os
import sys
import threading
from pathlib import Path
from types import ModuleType

import pytest
from safetensors import SafetensorError

from mca_lib.errors import ConfigError, DataError, ModelError
from mca_lib.progress import tell
from mca_lib.rank_process import ERRORS_VARIABLE, first_failure, report_failure
from mca_lib.run_train import data_collator_wrapper, download_model, get_args, main
from tests.mca_lib.trainers.training import make_store, read_json

ARGUMENTS = {"output_dir": "out", "model_name_or_path": "model", "token_store": "store"}


def write(path: Path, **changes: object) -> str:
    path.write_text(json.dumps({**ARGUMENTS, **changes}))
    return str(path)


def test_a_json_file_and_flags_give_the_same_arguments(tmp_path):
    by_file = get_args([write(tmp_path / "a.json", tensor_model_parallel_size=2, bf16=True, lora_rank=4)])
    flags = [f"--{name}={value}" for name, value in ARGUMENTS.items()]
    by_flags = get_args([*flags, "--tensor_model_parallel_size=2", "--bf16=true", "--lora_rank=4"])
    assert [type(group) for group in by_file] == [type(group) for group in by_flags]
    assert by_file[1:] == by_flags[1:]
    assert (by_file[0].tensor_model_parallel_size, by_file[0].bf16) == (2, True)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"learning_rte": 1e-3}, "learning_rte"),
        ({"stage": "rm"}, "stage='rm'"),
        ({"finetuning_type": "freeze"}, "finetuning_type='freeze'"),
        ({"model_name_or_path": ""}, "model_name_or_path is empty"),
        ({"num_train_epochs": -1.0}, "num_train_epochs=-1.0: use a finite number above 0"),
        ({"max_grad_norm": float("nan")}, "max_grad_norm=nan: use"),
        ({"weight_decay": float("inf")}, "weight_decay=inf: use"),
        ({"adam_beta2": 1.0}, "adam_beta2=1.0: use"),
        ({"global_batch_size": 0}, "global_batch_size=0: use a number of at least 1"),
        ({"mtp_loss_weight": "0.1"}, "mtp_loss_weight='0.1': use"),
        ({"seed": 2**31}, "seed=2147483648: use"),
    ],
)
def test_a_wrong_argument_is_named(tmp_path, changes, named):
    with pytest.raises(ConfigError, match=named) as caught:
        get_args([write(tmp_path / "a.json", **changes)])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "error", "named"),
    [
        ({"finetuning_type": "lora", "lora_rank": 0}, ConfigError, "lora.r: 0 is not positive"),
        ({"finetuning_type": "lora", "use_dora": True}, ConfigError, "use_dora=True is not supported"),
        ({"stage": "dpo", "pref_loss": "kto_pair"}, ConfigError, "pref_loss='kto_pair'"),
        ({"stage": "dpo", "use_ref_model": False}, ConfigError, "use_ref_model=False"),
        ({"stage": "dpo", "use_ref_model": True, "pref_loss": "orpo"}, ConfigError, "has no reference"),
        ({"use_mca": False, "context_parallel_size": 2}, ConfigError, "context_parallel_size=2 has no effect"),
        ({"token_store": None}, ConfigError, "token_store is missing"),
        ({"token_store": "/nowhere"}, DataError, "has no split 'train'"),
    ],
)
def test_what_cannot_be_trained_is_refused_and_the_launcher_is_told(tmp_path, monkeypatch, changes, error, named):
    monkeypatch.setenv(ERRORS_VARIABLE, str(tmp_path))
    with pytest.raises(error, match=named):
        main([write(tmp_path / "a.json", **changes)])
    failure = read_json(tmp_path / "rank-0.json")
    assert (failure["kind"], failure["type"]) == ("user", error.__name__)
    assert named in failure["message"]


def test_a_batch_that_does_not_fit_the_ranks_is_refused_before_the_model_is_looked_for(tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "3")
    store = make_store(tmp_path / "store", rows=2)
    with pytest.raises(ConfigError, match=r"3 ranks cannot be split into tensor_model_parallel_size=2"):
        main([write(tmp_path / "a.json", token_store=str(store), tensor_model_parallel_size=2)])


@pytest.mark.parametrize(("stage", "objective"), [("dpo", "sft"), ("dpo", "pt"), ("sft", "dpo"), ("pt", "dpo")])
def test_a_token_store_of_another_kind_is_refused(tmp_path, stage, objective):
    store = make_store(tmp_path / "store", rows=2)
    (store / "meta.json").write_text(json.dumps({"objective": objective}))
    with pytest.raises(DataError, match=f"was made for stage '{objective}', not '{stage}'"):
        main([write(tmp_path / "a.json", token_store=str(store), stage=stage)])


def test_the_collator_shifts_labels_against_all_else():
    collate = data_collator_wrapper(lambda features: features[0])
    batch = collate([{"input_ids": [1, 2, 3], "attention_mask": [1, 1, 1], "labels": [-100, 2, 3]}])
    assert batch == {"input_ids": [1, 2], "attention_mask": [1, 1], "labels": [2, 3]}


def test_the_first_failure_is_the_cause_and_a_users_mistake_goes_first(tmp_path, monkeypatch):
    monkeypatch.setenv(ERRORS_VARIABLE, str(tmp_path))
    for rank, error in ((1, ValueError("the cause")), (0, ConnectionError("what followed"))):
        monkeypatch.setenv("RANK", str(rank))
        report_failure(error)
    assert first_failure(tmp_path)["message"] == "the cause"
    monkeypatch.setenv("RANK", "2")
    report_failure(ConfigError("mend this"))
    assert first_failure(tmp_path)["message"] == "mend this"


def test_a_full_disk_is_the_users_to_mend(tmp_path, monkeypatch):
    monkeypatch.setenv(ERRORS_VARIABLE, str(tmp_path))
    full = OSError(28, "No space left on device", "/somewhere/checkpoint-1")
    made_of_it = RuntimeError("unexpected pos 704 vs 598")
    made_of_it.__context__ = full
    rust = "Error while serializing: I/O error: No space left on device (os error 28)"
    copied = OSError(28, "No space left on device", "/source", None, "/somewhere/target")
    named_by = {
        full: "/somewhere/checkpoint-1",
        made_of_it: "/somewhere/",
        copied: "/target",
        SafetensorError(rust): "",
    }
    for error, named in named_by.items():
        report_failure(error)
        assert first_failure(tmp_path)["type"] == "ResourceError"
        assert named in first_failure(tmp_path)["message"]
    (tmp_path / "rank-0.tmp").symlink_to("/dev/full")
    report_failure(full)  # which raises nothing of its own


def test_a_disk_that_is_full_of_progress_names_its_file(monkeypatch):
    monkeypatch.setenv("MCAFLOW_PROGRESS", "/dev/full")
    with pytest.raises(OSError, match="No space left on device: '/dev/full'"):
        tell("info", "a line")


@pytest.fixture
def hub(tmp_path, monkeypatch) -> list[str]:
    """A hub whose snapshots take until two callers had time to collide; returns what was downloaded."""
    downloaded, present = [], set()

    def snapshot_download(name: str, local_dir: str | None = None) -> str:
        if name == "owner/gone":
            raise ConnectionError("404 not found\nfor url")
        if name not in present:
            overlapping.wait(0.2)
            downloaded.append(name)
            present.add(name)
        return f"{tmp_path}/{name}"

    overlapping = threading.Event()
    for module in ("huggingface_hub", "modelscope"):
        fake = ModuleType(module)
        fake.snapshot_download = snapshot_download
        monkeypatch.setitem(sys.modules, module, fake)
    monkeypatch.setenv("MCAFLOW_CACHE", str(tmp_path / "cache"))
    return downloaded


def test_a_local_model_is_passed_through(tmp_path):
    assert download_model(str(tmp_path)) == str(tmp_path)


@pytest.mark.parametrize("modelscope", ["0", "1"])
def test_concurrent_callers_download_once(hub, monkeypatch, modelscope):
    monkeypatch.setenv("USE_MODELSCOPE", modelscope)
    callers = [threading.Thread(target=download_model, args=("owner/model",)) for _ in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert hub == ["owner/model"]


def test_the_lock_lies_in_the_expanded_cache_folder(hub, monkeypatch, tmp_path):
    monkeypatch.delenv("MCAFLOW_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    download_model("owner/model")
    assert list((tmp_path / "home/.cache/mcaflow/locks").iterdir())
    assert not os.path.exists("~")


def test_a_path_that_is_not_there_is_not_looked_for_on_the_hub(hub):
    with pytest.raises(ModelError, match="is not a directory"):
        download_model("./missing")
    assert hub == []


def test_a_model_that_the_hub_does_not_have_is_one_line(hub):
    with pytest.raises(ModelError, match=r"'owner/gone' cannot be downloaded: 404 not found for url$"):
        download_model("owner/gone")
