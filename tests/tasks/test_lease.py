"""One holder at a time; a dead one is replaced at once, a silent one after a while, and a replaced one notices."""

import json
import os
import signal
import threading
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from tasks import lease as module
from tasks.cancel import Scope, cancel_all, scope
from tasks.errors import Cancelled, LeaseLost
from tasks.lease import Lease, Owner, acquire, is_held
from tests.tasks.toys import start

NAME = "train-0123"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "leases"


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "HEARTBEAT_SECONDS", 0.05)
    monkeypatch.setattr(module, "STALE_SECONDS", 0.4)
    monkeypatch.setattr(module, "POLL_SECONDS", (0.01, 0.02))


def take(folder: Path, waits: list[str] | None = None) -> Lease:
    said = waits if waits is not None else []
    return acquire(folder, NAME, scope=Scope(), on_wait=said.append)


def elsewhere() -> Owner:
    """An owner on another machine, of whose process nothing is known here."""
    return replace(Owner.me(), host="elsewhere", boot="another boot", uuid="theirs")


def put(folder: Path, owner: Owner, number: int = 1) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / f"{NAME}.{number}"
    path.write_text(json.dumps(asdict(owner)))
    return path


def test_released_lease_leaves_no_file_and_no_thread(folder: Path) -> None:
    threads = threading.active_count()
    with take(folder) as held:
        held.check()
        assert is_held(held.path)
    assert list(folder.iterdir()) == []
    assert threading.active_count() == threads


def test_second_taker_waits_for_the_first_and_says_for_whom(folder: Path, quick: None) -> None:
    order, waits = [], []
    waiting = threading.Event()

    def second() -> None:
        def say(line: str) -> None:
            waits.append(line)
            waiting.set()

        with acquire(folder, NAME, scope=Scope(), on_wait=say):
            order.append("second")

    with take(folder):
        thread = threading.Thread(target=second)
        thread.start()
        assert waiting.wait(60)
        order.append("first")
    thread.join(60)
    assert order == ["first", "second"]
    assert waits == [f"waiting for {NAME}: process {os.getpid()} on {Owner.me().host} is computing it"]


def test_lease_of_a_killed_process_is_taken_over_at_once(folder: Path) -> None:
    code = (
        "from tasks.lease import acquire\n"
        "from tasks.cancel import Scope\n"
        "with acquire(Path(sys.argv[1]), sys.argv[2], scope=Scope(), on_wait=print):\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    holder = start(code, folder, NAME)
    holder.communicate()
    assert holder.returncode == -signal.SIGKILL
    assert [path.name for path in folder.iterdir()] == [f"{NAME}.1"]
    waits: list[str] = []
    with take(folder, waits) as held:
        assert held.number == 2
        assert [path.name for path in folder.iterdir()] == [f"{NAME}.2"]
    assert waits == []


def test_pid_that_was_given_to_another_process_does_not_count_as_alive(folder: Path) -> None:
    put(folder, replace(Owner.me(), started=1, uuid="theirs"))
    with take(folder) as held:
        assert held.number == 2


def test_silent_holder_on_another_machine_is_replaced_after_a_while(folder: Path, quick: None) -> None:
    put(folder, elsewhere())
    waits: list[str] = []
    with take(folder, waits) as held:
        assert held.number == 2
    assert "on elsewhere" in waits[0]


def test_holder_whose_heart_beats_is_not_replaced(folder: Path, quick: None) -> None:
    path = put(folder, elsewhere())
    stop, taken = threading.Event(), threading.Event()

    def beat() -> None:
        while not stop.wait(0.05):
            os.utime(path)

    def second() -> None:
        with take(folder):
            taken.set()

    threads = [threading.Thread(target=beat), threading.Thread(target=second)]
    for thread in threads:
        thread.start()
    assert not taken.wait(3 * module.STALE_SECONDS)
    stop.set()
    assert taken.wait(60)
    for thread in threads:
        thread.join()


def test_own_heartbeat_moves_the_file_time(folder: Path, quick: None) -> None:
    with take(folder) as held:
        os.utime(held.path, (1, 1))
        beaten = threading.Event()
        while held.path.stat().st_mtime == 1:
            beaten.wait(0.01)


def test_unreadable_lease_is_not_taken_for_a_dead_one_until_it_is_stale(folder: Path, quick: None) -> None:
    folder.mkdir()
    (folder / f"{NAME}.1").write_text("")
    assert is_held(folder / f"{NAME}.1")
    waits: list[str] = []
    with take(folder, waits) as held:
        assert held.number == 2
    assert waits == [f"waiting for {NAME}: another run holds it"]


@pytest.mark.parametrize("clean", [True, False], ids=["own file gone", "own file still there"])
def test_replaced_holder_notices_and_leaves_its_successor_alone(folder: Path, clean: bool) -> None:
    with take(folder) as held:
        successor = put(folder, elsewhere(), held.number + 1)
        if clean:
            held.path.unlink()
        with pytest.raises(LeaseLost, match="another run has taken over"):
            held.check()
    assert successor.exists()


def test_holder_notices_when_its_number_was_given_out_again(folder: Path) -> None:
    with take(folder) as held:
        put(folder, elsewhere(), held.number)
        with pytest.raises(LeaseLost):
            held.check()
    assert held.path.exists()


def test_takeover_on_outdated_knowledge_gives_way(folder: Path) -> None:
    # B saw the dead A at number 1; meanwhile C replaced A, finished and left; D holds number 1 of the new count.
    put(folder, elsewhere())
    taken = module._take(folder, NAME, [1], Owner.me(), replaced=replace(elsewhere(), uuid="A"))
    assert taken is None
    assert [path.name for path in folder.iterdir()] == [f"{NAME}.1"]


def test_many_takers_never_hold_it_together(folder: Path, quick: None, tmp_path: Path) -> None:
    put(folder, replace(Owner.me(), started=1, uuid="dead"))
    code = (
        "from tasks.lease import acquire\n"
        "from tasks.cancel import Scope\n"
        "for _ in range(10):\n"
        "    with acquire(Path(sys.argv[1]), sys.argv[2], scope=Scope(), on_wait=lambda line: None) as held:\n"
        "        os.mkdir(sys.argv[3])\n"
        "        held.check()\n"
        "        os.rmdir(sys.argv[3])\n"
    )
    takers = [start(code, folder, NAME, tmp_path / "inside") for _ in range(3)]
    assert [taker.communicate()[0] for taker in takers] == [""] * 3
    assert list(folder.iterdir()) == []


def test_file_system_without_hard_links_works(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(os, "link", refuse)
    with take(folder) as held:
        held.check()
        assert not module._create(folder, NAME, held.number, Owner.me())


def test_wait_ends_when_the_run_is_cancelled(folder: Path) -> None:
    waiting, ended = threading.Event(), []

    def wait() -> None:
        with scope() as running, pytest.raises(Cancelled):
            acquire(folder, NAME, scope=running, on_wait=lambda line: waiting.set())
        ended.append(True)

    with take(folder):
        thread = threading.Thread(target=wait)
        thread.start()
        assert waiting.wait(60)
        cancel_all()
        thread.join(60)
        assert ended == [True]
