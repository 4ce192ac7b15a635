"""Ranks that die are started again from the newest checkpoint; what would fail again is not tried again."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mca_lib.rank_process import ERRORS_VARIABLE
from mca_lib.trainers.progress import read_log
from tests.mca_lib.trainers.training import HYPERPARAMETERS, history, make_model, make_store, read_json, train

ATTEMPT = """
import os, signal, sys
from pathlib import Path
from mca_lib.errors import ConfigError
from mca_lib.rank_process import report_failure
attempt, rank = os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["RANK"]
Path(sys.argv[1], f"{attempt}-{rank}").touch()
if rank == "1" and attempt == "0":
    if sys.argv[2] == "word":
        report_failure(ConfigError("mend this"))
        os.kill(os.getpid(), signal.SIGKILL)
    if sys.argv[2] == "defect":
        report_failure(ValueError("once"))
        sys.exit(1)
    sys.exit(int(sys.argv[2]))
if rank == "0" and attempt == "0":
    signal.pause()
"""
DYING = """
import os, signal
from mca_lib.run_train import main
from tests.mca_lib.trainers.training import kill_in_step
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    kill_in_step(7, signal.SIGKILL)
main()
"""


def launch(folder: Path, script: str, *arguments: object, ranks: int = 2, supervised: bool = True) -> tuple[int, str]:
    """Run a script with two restarts. Returns exit status and output."""
    (folder / "failures").mkdir(parents=True)
    (folder / "rank.py").write_text(script)
    options = ["--nnodes=1", f"--nproc-per-node={ranks}", "--max-restarts=2", "--rdzv-backend=c10d"]
    where = ["--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1", folder / "rank.py"]
    command = [sys.executable, "-m", "mca_lib.launch", *options, *where, *arguments]
    told = {ERRORS_VARIABLE: str(folder / "failures"), "MCAFLOW_PROGRESS": str(folder / "told")}
    env = {**os.environ, "PYTHONPATH": os.getcwd(), **(told if supervised else {}), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*map(str, command)], env=env, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


def warnings(folder: Path) -> list[str]:
    """What the run is told of it."""
    lines = (folder / "told").read_text().splitlines() if (folder / "told").exists() else []
    return [line["warning"] for line in map(json.loads, lines) if "warning" in line]


@pytest.mark.parametrize(("ending", "attempts"), [("2", 1), ("143", 1), ("word", 1), ("defect", 2)])
def test_a_mistake_of_the_user_and_sigterm_are_not_tried_again(tmp_path, ending, attempts):
    (tmp_path / "started").mkdir()
    status, output = launch(tmp_path / "run", ATTEMPT, tmp_path / "started", ending)
    assert len(list((tmp_path / "started").glob("*-1"))) == attempts, output
    assert (status == 0) == (attempts > 1)
    left = [json.loads(path.read_text())["kind"] for path in (tmp_path / "run/failures").iterdir()]
    assert left == (["user"] if ending == "word" else []), "what was recovered from is no failure any more"
    assert ("all ranks are started again after" in output) == (ending == "defect")
    again = ["rank 1 failed: ValueError: once; all ranks start again, restart 1 of 2"]
    assert warnings(tmp_path / "run") == (again if ending == "defect" else [])


def test_without_a_supervisor_the_launcher_itself_tells_a_mistake_of_the_user(tmp_path):
    (tmp_path / "started").mkdir()
    status, output = launch(tmp_path / "run", ATTEMPT, tmp_path / "started", "word", supervised=False)
    assert status == 2
    assert output.splitlines()[-1] == "error: mend this"
    assert "Traceback" not in output


def test_a_rank_that_is_killed_costs_the_steps_since_the_newest_checkpoint(ranks, tmp_path):
    ranks(1, make_model, tmp_path / "model", 0.1)
    store = make_store(tmp_path / "store", rows=18)
    options = {"num_train_epochs": 2, "save_steps": 2, "save_total_limit": 2, "async_save": True}
    places = {
        "model_name_or_path": str(tmp_path / "model"),
        "token_store": str(store),
        "output_dir": str(tmp_path / "out"),
    }
    arguments = tmp_path / "arguments.json"
    arguments.write_text(json.dumps({**HYPERPARAMETERS, **options, **places, "do_eval": False}))
    # One rank, for each imports all anew; the tests above have several.
    status, output = launch(tmp_path / "run", DYING, arguments, ranks=1)
    assert status == 0, output
    assert "resuming from" in output
    killed = "rank 0 was killed by SIGKILL (often the kernel, out of memory)"
    assert killed + "; all ranks start again, restart 1 of 2" in warnings(tmp_path / "run")
    assert read_json(tmp_path / "out/train_result.json")["restarts"] == 1
    straight = ranks(1, train, str(tmp_path / "model"), str(store), str(tmp_path / "straight"), options)
    assert (history([{"log": read_log(tmp_path / "out")}]) == history(straight)).all()
    for name in ("train_loss", "final_loss", "tokens"):
        assert read_json(tmp_path / "out/train_result.json")[name] == straight[0]["result"][name]
