"""Text is tokenized on Slurm to the bytes that this machine makes, by one job at a time."""

import os
import socket
import subprocess
from contextlib import ExitStack
from pathlib import Path

import pytest

from mca_lib.data import shards
from mca_lib.data.formats import resolve_sources
from mca_lib.data.spec import EXECUTOR, DatasetSpec
from mca_lib.data.tokenization import build_executor, tokenize
from tests import slurm_cluster
from tests.mca_lib.data.conftest import VOCAB_SIZE
from tests.ports import free_port

ROOT = Path(__file__).parents[3]


def queue(name: str) -> str:
    return subprocess.run(["squeue", "-h", "--name", name], check=True, capture_output=True, text=True).stdout


def test_slurm_writes_the_same_bytes_and_cancels_what_a_killed_run_left(tokenizer_dir, tmp_path, monkeypatch):
    if lacking := slurm_cluster.missing():
        assert "MCAFLOW_REQUIRE_SLURM" not in os.environ, f"the tests of Slurm need {lacking}"
        pytest.skip(f"NOT RUN: the tests of Slurm need {lacking}")
    monkeypatch.setattr(shards, "SHARD_BYTES", 2000)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    text = tmp_path / "text.txt"
    text.write_text("".join(f"Ferry {i} leaves Norwick.\n" for i in range(120)), encoding="utf-8")
    (tmp_path / "cluster").mkdir()
    written = {}
    with socket.create_server(("", free_port())) as taken, ExitStack() as stack:
        ports = iter([taken.getsockname()[1]])
        with monkeypatch.context() as patch:  # the first port that the cluster gets is not free any more
            patch.setattr(slurm_cluster, "free_port", lambda: next(ports, None) or free_port())
            env = stack.enter_context(slurm_cluster.cluster(tmp_path / "cluster"))
        for name, value in env.items():
            monkeypatch.setenv(name, value)
        for kind in ("local", "slurm"):
            work = tmp_path / kind
            work.mkdir()
            settings = {**EXECUTOR, "kind": kind, "partition": "debug", "sbatch_args": {"mem-per-cpu": "300M"}}
            settings["time"] = "00:10:00"
            job = DatasetSpec([str(text)], formatting="text", tokenizer_dir=str(tokenizer_dir), vocab_size=VOCAB_SIZE)
            parts = shards.cut_sources(resolve_sources(job, "pt"))
            shards.write_shards(work / "shards.jsonl", parts)
            if kind == "slurm":
                left = build_executor(settings, 2, [], len(parts), work).job_name
                subprocess.run(["sbatch", "--hold", "--mem=100M", "--job-name", left, "--wrap", "true"], check=True)
                assert queue(left)
            tokenize(DatasetSpec(**{**vars(job), "executor": settings, "num_workers": 2}), work, len(parts))
            written[kind] = {path.name: path.read_bytes() for path in (work / "tokens").iterdir()}
        assert not queue(left)
    assert len(parts) == 2
    assert written["slurm"] == written["local"]
