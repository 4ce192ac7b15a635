"""The rank pool itself: values come back by rank, failures carry their traceback, nothing hangs or survives."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from mca_lib.errors import ModelError
from tests.ranks import RankError


def sum_of_ranks(offset: int) -> tuple[int, float, int]:
    import torch
    import torch.distributed as dist

    total = torch.tensor(float(dist.get_rank() + offset))
    dist.all_reduce(total)
    return dist.get_rank(), total.item(), os.getpid()


def return_at_once() -> None:
    pass


def raise_on_rank_1() -> None:
    import torch.distributed as dist

    if dist.get_rank() == 1:
        raise ValueError("the odd one")
    dist.barrier()


def raise_user_error_on_rank_1() -> None:
    import torch.distributed as dist

    if dist.get_rank() == 1:
        raise ModelError("model.safetensors: not whole")
    dist.barrier()


def hang_on_rank_1() -> None:
    import torch.distributed as dist

    if dist.get_rank() == 1:
        signal.pause()


def die_on_rank_0() -> None:
    import torch.distributed as dist

    if dist.get_rank() == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def test_values_come_back_in_order_of_rank(ranks):
    values = ranks(3, sum_of_ranks, 10)
    assert [(rank, total) for rank, total, _ in values] == [(0, 33.0), (1, 33.0), (2, 33.0)]


def test_a_rank_that_has_nothing_to_do_waits_until_its_peers_have_joined(ranks):
    for _ in range(6):  # without the wait, about every second call failed
        assert ranks(3, return_at_once) == [None] * 3


def test_the_failing_ranks_traceback_is_raised(ranks):
    with pytest.raises(RankError, match=r"(?s)rank 1.*ValueError: the odd one"):
        ranks(2, raise_on_rank_1)


def test_a_hanging_rank_is_killed_with_its_stack(ranks):
    with pytest.raises(RankError, match=r"(?s)exceeded 2 s.*hang_on_rank_1"):
        ranks(2, hang_on_rank_1, timeout=2)


def test_a_killed_rank_is_named_with_its_exit_status(ranks):
    with pytest.raises(RankError, match=r"rank 0, exit -9"):
        ranks(2, die_on_rank_0)


def test_no_rank_outlives_its_call(ranks):
    for _, _, pid in ranks(2, sum_of_ranks, 0):
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_what_a_user_can_mend_comes_back_as_such(ranks):
    with pytest.raises(RankError) as raised:
        ranks(2, raise_user_error_on_rank_1)
    assert type(raised.value.user_error) is ModelError
    assert str(raised.value.user_error) == "model.safetensors: not whole"
    assert raised.value.summary == "rank 1 of 2: ModelError: model.safetensors: not whole"


def test_nothing_outlives_a_caller_that_is_killed(tmp_path):
    root = Path(__file__).parents[2]
    script = "from mca_lib.ranks import RankPool\nimport pool_work\nRankPool().run_ranks(2, pool_work.wait)"
    (tmp_path / "pool_work.py").write_text(
        "import pathlib, time\n"
        "def wait():\n"
        "    pathlib.Path(__file__).with_name('running').touch()\n"
        "    time.sleep(60)\n"
    )
    env = os.environ | {"PYTHONPATH": f"{root}{os.pathsep}{tmp_path}"}
    caller = subprocess.Popen([sys.executable, "-c", script], env=env)
    try:
        while not (tmp_path / "running").exists():
            assert caller.poll() is None
            time.sleep(0.1)
        family = psutil.Process(caller.pid).children(recursive=True)
        assert len(family) == 3  # the server and two ranks
    finally:
        caller.kill()
        caller.wait()
    assert psutil.wait_procs(family, timeout=60)[1] == []
