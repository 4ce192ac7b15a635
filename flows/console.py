"""What a person sees while a run goes on: one line per stage, with a live bar where there is a terminal.

The console of the current run travels in a context variable, so that tasks that Prefect runs in threads find it; a
run that a Prefect worker started has none, and its stages report to Prefect alone.
"""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Column, Table

WIDE = 500
"""Columns where no terminal sets them, and of tables of numbers, which a narrow terminal wraps."""
_PLAIN_INTERVAL_S = 10.0
"""Without a terminal, a running stage prints a line this often."""

_current: ContextVar["RunConsole | None"] = ContextVar("mcaflow_console", default=None)


def make_console(*, stderr: bool = False) -> Console:
    """For stdout or stderr. Into a pipe or a file, lines are as long as they are: rich would end them at 80 columns."""
    is_terminal = (sys.stderr if stderr else sys.stdout).isatty()
    return Console(stderr=stderr, width=None if is_terminal else WIDE)


def plain_table(*headings: str, show_header: bool = True) -> Table:
    """Columns without lines between them. What is too wide for a terminal is wrapped, not cut."""
    columns = [Column(heading, overflow="fold") for heading in headings]
    return Table(*columns, box=None, pad_edge=False, show_header=show_header)


def current_console() -> "RunConsole | None":
    """The console of the run that this context belongs to, if a person is looking."""
    return _current.get()


@contextmanager
def run_console(console: Console) -> Iterator["RunConsole"]:
    """Show the stages of one run on ``console`` until the block ends."""
    columns = (
        SpinnerColumn(finished_text=" "),
        TextColumn("{task.fields[stage]:<9}"),
        BarColumn(bar_width=24),
        TimeElapsedColumn(),
        TextColumn("{task.fields[note]}"),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal) as bars:
        shown = RunConsole(console, bars)
        token = _current.set(shown)
        try:
            yield shown
        finally:
            _current.reset(token)


class RunConsole:
    """Bars in a terminal, plain lines elsewhere. Safe to call from any thread."""

    def __init__(self, console: Console, bars: Progress) -> None:
        self._console = console
        self._bars = bars
        self._tasks: dict[str, TaskID] = {}
        self._printed: dict[str, float] = {}

    def started(self, stage: str) -> None:
        """The stage is being computed."""
        self._tasks[stage] = self._bars.add_task("", total=None, stage=stage, note="")
        self._printed[stage] = time.monotonic()
        if not self._console.is_terminal:
            self.line(f"{stage:<9} started")

    def progress(self, stage: str, done: float, total: float | None, note: str, *, keep: bool = False) -> None:
        """``done`` of ``total`` units (None: unknown); ``note`` is the rest of the line.

        Lines that follow each other quickly are left out, but not those to ``keep``.
        """
        note = f"{fraction(done, total)}  {note}"
        if stage in self._tasks:
            self._bars.update(self._tasks[stage], completed=done, total=total, note=note)
        is_due = time.monotonic() - self._printed.get(stage, 0.0) >= _PLAIN_INTERVAL_S
        if keep or (is_due and not self._console.is_terminal):
            self._printed[stage] = time.monotonic()
            self.line(f"{stage:<9} {note}")

    def finished(self, stage: str, note: str) -> None:
        """The stage has its artifact; ``note`` says how it came by it."""
        if stage in self._tasks:
            task = self._tasks.pop(stage)
            total = next((t.total for t in self._bars.tasks if t.id == task), None) or 1
            self._bars.update(task, completed=total, total=total, note=note)
        elif self._console.is_terminal:
            task = self._bars.add_task("", total=1, stage=stage, note=note)
            self._bars.update(task, completed=1)
        if not self._console.is_terminal:
            self.line(f"{stage:<9} {note}")

    def line(self, text: str, style: str | None = None) -> None:
        """One line above the bars."""
        self._bars.console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)


def fraction(done: float, total: float | None) -> str:
    """``12/80``, or ``12`` where the total is unknown; ``started`` before anything is counted."""
    if total is None:
        return f"{done:,.0f}" if done else "started"
    return f"{done:,.0f}/{total:,.0f}"


def describe_metrics(metrics: dict[str, object]) -> str:
    """``loss 1.234  4,512 tokens/s  0:21 left``: the metrics of a progress report as a short text."""
    parts = []
    for name, value in metrics.items():
        match name, value:
            case _, None:
                continue
            case "doing", str():
                parts.append(value)
            case "eta_seconds", int() | float():
                parts.append(f"{int(value) // 60}:{int(value) % 60:02d} left")
            case "tokens_per_second", int() | float():
                parts.append(f"{value:,.0f} tokens/s")
            case "memory_mb", int() | float():
                parts.append(f"{value:,.0f} MB")
            case "mfu", int() | float():
                parts.append(f"mfu {value:.1%}")
            case "learning_rate", int() | float():
                parts.append(f"lr {value:.2e}")
            case (("step" | "total" | "done" | "epoch" | "time"), _):
                continue
            case (("tokens_per_second_per_device" | "step_seconds" | "data_wait" | "eval_runtime"), _):
                continue  # in the log
            case str(), _ if "/" in name and not name.endswith(("rewards/margins", "rewards/accuracies")):
                continue  # one line has no room for all measures of a preference training; the log has them
            case _, float():
                parts.append(f"{name.replace('_', ' ')} {value:.4g}")
            case _:
                parts.append(f"{name.replace('_', ' ')} {value}")
    return "  ".join(parts)
