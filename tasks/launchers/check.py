"""What a launcher lacks on this machine, said before anything runs."""

import os
import shutil
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path

from mca_lib.errors import ConfigError
from mca_lib.launch_plan import split_endpoint
from tasks.launchers.slurm import check_job
from tasks.training_config import LauncherConfig, TrainingConfig


def launcher_problems(launcher: LauncherConfig) -> Iterator[str]:
    """Fields of the section that do not go together: `field: reason`."""
    if launcher.kind == "local" and launcher.nnodes > 1:
        yield f"launcher.nnodes: {launcher.nnodes} machines, but launcher.kind is local; use nodes or slurm"
    if launcher.kind == "nodes":
        if launcher.nnodes == 1:
            yield "launcher.nnodes: launcher.kind nodes is for 2 machines or more; use local"
        if launcher.rdzv_endpoint is None:
            yield "launcher.rdzv_endpoint: required for launcher.kind nodes; host:port of this machine"
    elif launcher.rdzv_endpoint is not None:
        yield f"launcher.rdzv_endpoint: has no effect with launcher.kind {launcher.kind}; leave it out, or use nodes"
    if launcher.rdzv_endpoint is not None:
        try:
            split_endpoint(launcher.rdzv_endpoint)
        except ValueError as error:
            yield f"launcher.rdzv_endpoint: {error}"
    if launcher.kind != "slurm" and launcher.slurm != type(launcher.slurm)():
        yield f"launcher.slurm: has no effect with launcher.kind {launcher.kind}; leave it out, or use slurm"


def check_launcher(launcher: LauncherConfig) -> None:
    """Raise a UserError where this machine cannot start the ranks that the section asks for."""
    if launcher.kind == "slurm":
        check_job(launcher)
        return
    ranks, cores = launcher.nproc_per_node, os.cpu_count() or 1
    if ranks > 8 * cores:  # they never end; eight a core is beyond any use
        raise ConfigError(f"launcher.nproc_per_node: {ranks} ranks are too many for a machine with {cores} CPU cores")
    if launcher.interface and not Path("/sys/class/net", launcher.interface).exists():
        known = ", ".join(sorted(name for _, name in socket.if_nameindex()))
        raise ConfigError(f"launcher.interface: this machine has no {launcher.interface}; it has {known}")
    if launcher.kind == "nodes":
        _check_endpoint(str(launcher.rdzv_endpoint))


def check_devices(launcher: LauncherConfig, training: TrainingConfig) -> None:
    """Raise ConfigError for options that need a GPU, where the ranks are of this machine and it clearly has none."""
    if launcher.kind != "local" or any(Path("/dev").glob("nvidia*")) or shutil.which("nvidia-smi"):
        return
    for name in ("fp8", "optimizer_offload_fraction"):
        if value := getattr(training, name):
            raise ConfigError(f"training.{name}: {value} needs a GPU, and this machine has none; leave it out")


def check_secrets(launcher: LauncherConfig, names: Sequence[str]) -> None:
    """Raise ConfigError where a tracker would be logged in here and not in the ranks.

    Secrets are written to no file and no store. torchrun decides which machine has rank 0, so even with `nodes` it may
    be another one.
    """
    for name in names if launcher.kind != "local" else ():
        if os.environ.get(name):
            raise ConfigError(
                f"training.report_to: ${name} does not reach the ranks of launcher.kind {launcher.kind}; log in by a "
                "file that all machines see (~/.netrc by `wandb login`, ~/.mlflow/credentials), and unset it"
            )


def _check_endpoint(endpoint: str) -> None:
    try:
        socket.create_server(split_endpoint(endpoint)).close()
    except OSError as error:
        # Python's own text repeats the address; the errors of name look-up have negative numbers.
        reason = os.strerror(error.errno) if (error.errno or 0) > 0 else "no such host"
        raise ConfigError(
            f"launcher.rdzv_endpoint: {endpoint}: {reason}; name a free port and an address of this machine"
        ) from None
