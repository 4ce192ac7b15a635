"""The store at which the machines of one run meet, as one of them sees it. Its keys, and who writes them:

    mcaflow/run            head            {"run": id, "plan": LaunchPlan, "lost_after": seconds}
    mcaflow/members        each adds 1     so that it knows its place; the head has 0
    mcaflow/name/<place>   each            host name
    mcaflow/go             head            all are here: start torchrun
    mcaflow/beat/<place>   each adds 1     once a second; a counter that stands still is a machine that is lost
    mcaflow/stop           any             a SIGTERM that one machine got is for all: they write a checkpoint and end
    mcaflow/end/<place>    each            exit status of its torchrun
    mcaflow/verdict        head            exit status of all: 0, 2 for a mistake of the user, 143 stopped, 1 otherwise

Values are text; counters are read by adding 0.
"""

import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager

from torch.distributed import TCPStore

from mca_lib.launch_plan import LaunchPlan

FAREWELL_SECONDS = 5.0
"""For ranks to say why they failed before they are killed, and for others to read the verdict."""


class HeadGone(Exception):
    """The store does not answer: the machine that hosts it is gone."""


class Meeting:
    """The store of one run, as the machine at `place` sees it. Its methods raise HeadGone."""

    def __init__(self, store: TCPStore, place: int, plan: LaunchPlan, run: str, lost_after: float) -> None:
        self.place, self.plan, self.run = place, plan, run
        self._lost_after = lost_after
        self._store = store
        self._beats = dict.fromkeys(range(plan.nnodes), (0, time.monotonic()))
        self._set(f"name/{place}", socket.gethostname())

    @property
    def members(self) -> int:
        return self._add("members", 0)

    def beat(self) -> None:
        """Say that this machine lives, and listen to the others."""
        self._add(f"beat/{self.place}", 1)
        for place in range(min(self.plan.nnodes, self.members)):
            if (beats := self._add(f"beat/{place}", 0)) != self._beats[place][0]:
                self._beats[place] = (beats, time.monotonic())

    def lost(self) -> str | None:
        """The machine that has not been heard of for too long, in words."""
        for place in range(min(self.plan.nnodes, self.members)):
            if time.monotonic() - self._beats[place][1] > self._lost_after and self.end_of(place) is None:
                return f"{self.describe(place)} is lost: no sign of life for {self._lost_after:.0f} s"
        return None

    def describe(self, place: int) -> str:
        return f"machine {place + 1} of {self.plan.nnodes} ({self._get(f'name/{place}') or 'unknown'})"

    def go(self) -> None:
        self._set("go", "1")

    @property
    def may_go(self) -> bool:
        return self._get("go") is not None

    def ask_to_stop(self) -> None:
        self._set("stop", self.describe(self.place))

    @property
    def stopped_by(self) -> str | None:
        return self._get("stop")

    def end(self, status: int) -> None:
        self._set(f"end/{self.place}", str(status))

    def end_of(self, place: int) -> int | None:
        status = self._get(f"end/{place}")
        return None if status is None else int(status)

    @property
    def ended(self) -> dict[int, int]:
        """Exit status by place, of the machines that have ended."""
        ends = {place: self.end_of(place) for place in range(self.plan.nnodes)}
        return {place: status for place, status in ends.items() if status is not None}

    @property
    def verdict(self) -> int | None:
        text = self._get("verdict")
        return None if text is None else int(text)

    def pronounce(self, verdict: int) -> None:
        """Tell the verdict, and wait until those that still listen have read it."""
        self._set("verdict", str(verdict))
        deadline = time.monotonic() + FAREWELL_SECONDS
        listeners = min(self.members, self.plan.nnodes) - 1
        while self._add("farewells", 0) < listeners and time.monotonic() < deadline:
            time.sleep(0.05)

    def take_leave(self) -> None:
        self._add("farewells", 1)

    def _get(self, key: str) -> str | None:
        with _answers():
            key = f"mcaflow/{key}"
            return self._store.get(key).decode() if self._store.check([key]) else None

    def _set(self, key: str, value: str) -> None:
        with _answers():
            self._store.set(f"mcaflow/{key}", value)

    def _add(self, key: str, count: int) -> int:
        with _answers():
            return self._store.add(f"mcaflow/{key}", count)


@contextmanager
def _answers() -> Iterator[None]:
    try:
        yield
    except (RuntimeError, ValueError, TimeoutError) as error:
        raise HeadGone(str(error).splitlines()[0]) from None
