"""What a launcher lacks is one line, before anything runs."""

import socket
from pathlib import Path

import pytest

from mca_lib.errors import ConfigError, ResourceError
from tasks.launchers.check import check_devices, check_launcher, check_secrets, launcher_problems
from tasks.training_config import LauncherConfig, SlurmConfig, TrainingConfig

NODES = {"kind": "nodes", "nnodes": 2, "rdzv_endpoint": "127.0.0.1:29500"}


@pytest.mark.parametrize("fields", [{}, NODES, {"kind": "slurm", "nnodes": 4}], ids=["local", "nodes", "slurm"])
def test_sections_that_agree(fields: dict):
    assert [*launcher_problems(LauncherConfig(**fields))] == []


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"nnodes": 2}, "launcher.nnodes: 2 machines, but launcher.kind is local; use nodes or slurm"),
        (NODES | {"nnodes": 1}, "launcher.nnodes: launcher.kind nodes is for 2 machines or more; use local"),
        (NODES | {"rdzv_endpoint": None}, "launcher.rdzv_endpoint: required for launcher.kind nodes; host:port of "),
        (NODES | {"rdzv_endpoint": "node1"}, "launcher.rdzv_endpoint: 'node1' is not host:port"),
        ({"rdzv_endpoint": "node1:1"}, "launcher.rdzv_endpoint: has no effect with launcher.kind local"),
        ({"slurm": SlurmConfig(partition="gpu")}, "launcher.slurm: has no effect with launcher.kind local"),
    ],
)
def test_fields_that_contradict_each_other_are_named(fields: dict, problem: str):
    (found,) = launcher_problems(LauncherConfig(**fields))
    assert found.startswith(problem)


def test_an_endpoint_must_be_a_free_port_of_this_machine():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        endpoint = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ConfigError, match=f"launcher.rdzv_endpoint: {endpoint}: Address already in use; name a "):
            check_launcher(LauncherConfig(**NODES | {"rdzv_endpoint": endpoint}))
    check_launcher(LauncherConfig(**NODES | {"rdzv_endpoint": endpoint}))
    with pytest.raises(ConfigError, match=r"launcher.rdzv_endpoint: no-such-host.invalid:29500: no such host; name"):
        check_launcher(LauncherConfig(**NODES | {"rdzv_endpoint": "no-such-host.invalid:29500"}))
    # 192.0.2.0/24 is of documentation, no machine's.
    with pytest.raises(ConfigError, match=r"launcher.rdzv_endpoint: 192.0.2.1:29500: .*an address of this machine"):
        check_launcher(LauncherConfig(**NODES | {"rdzv_endpoint": "192.0.2.1:29500"}))


@pytest.mark.parametrize("fields", [{"fp8": "hybrid"}, {"optimizer_offload_fraction": 0.5}], ids=["fp8", "offload"])
def test_what_needs_a_gpu_is_refused_where_there_is_clearly_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fields: dict
):
    training = TrainingConfig(preflight=False, **fields)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(Path, "glob", lambda *_: iter(()))
    with pytest.raises(ConfigError, match=f"training.{next(iter(fields))}: .* needs a GPU, and this machine has none"):
        check_devices(LauncherConfig(), training)
    check_devices(LauncherConfig(), TrainingConfig())
    check_devices(LauncherConfig(kind="slurm"), training)
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    check_devices(LauncherConfig(), training)


def test_ranks_are_counted_where_they_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(ConfigError, match=r"launcher.nproc_per_node: 1000 ranks are too many"):
        check_launcher(LauncherConfig(nproc_per_node=1000))
    for name in ("sbatch", "srun", "scontrol", "squeue", "scancel"):
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    check_launcher(LauncherConfig(kind="slurm", nproc_per_node=1000))
    (tmp_path / "squeue").unlink()
    with pytest.raises(ResourceError, match=r"launcher.kind: slurm, but there is no squeue here"):
        check_launcher(LauncherConfig(kind="slurm"))


def test_a_secret_that_the_ranks_would_not_have_is_named(monkeypatch: pytest.MonkeyPatch):
    names = ["MLFLOW_TRACKING_TOKEN", "WANDB_API_KEY"]
    monkeypatch.setenv("WANDB_API_KEY", "hush")
    check_secrets(LauncherConfig(), names)
    with pytest.raises(ConfigError, match=r"\$WANDB_API_KEY does not reach the ranks of launcher.kind nodes") as caught:
        check_secrets(LauncherConfig(**NODES), names)
    assert "hush" not in str(caught.value)
    monkeypatch.delenv("WANDB_API_KEY")
    check_secrets(LauncherConfig(**NODES), names)


def test_an_interface_must_be_there():
    with pytest.raises(ConfigError, match=r"launcher.interface: this machine has no eth99; it has .*lo"):
        check_launcher(LauncherConfig(interface="eth99"))
