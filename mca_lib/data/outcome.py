"""What became of the rows that passed validation."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mca_lib.data.encoding import CUT_OFF, EQUAL_ANSWERS, EncodedChunk
from mca_lib.data.rows import MAX_NAMED_ROWS, Summary, too_many_bad_rows
from mca_lib.data.spec import DatasetSpec
from mca_lib.errors import DataError

MAX_CUT_OFF_FRACTION = 0.5
"""`cutoff_len` is taken for a mistake when more than this share of the rows has no label left by it."""
EQUAL_TO_HELD_OUT = "equal to a row of the eval files"


@dataclass
class Outcome:
    """Counts by reason, and the first rows by name."""

    not_drawn: int = 0
    kept: int = 0
    truncated: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    bad: Counter[str] = field(default_factory=Counter)
    """Rows that only encoding finds to be unusable, by reason."""
    named: list[str] = field(default_factory=list)
    """The first of the dropped rows, each as `file:line: reason`."""
    named_bad: list[str] = field(default_factory=list)
    """The same of the bad rows."""

    def add(self, chunk: EncodedChunk) -> None:
        self.kept += len(chunk.lengths_N)
        self.truncated += chunk.truncated
        self.dropped.update(reason for reason, _ in chunk.dropped)
        self.bad.update(reason for reason, _, _ in chunk.bad)
        self.named += [f"{where}: {reason}" for reason, where in chunk.dropped]
        self.named_bad += [f"{where}: {reason}{detail}" for reason, detail, where in chunk.bad]
        del self.named[MAX_NAMED_ROWS:], self.named_bad[MAX_NAMED_ROWS:]

    def merge(self, other: Mapping[str, Any]) -> None:
        """Add the fields of another one."""
        self.kept += other["kept"]
        self.truncated += other["truncated"]
        self.dropped.update(other["dropped"])
        self.bad.update(other["bad"])
        self.named = [*self.named, *other["named"]][:MAX_NAMED_ROWS]
        self.named_bad = [*self.named_bad, *other["named_bad"]][:MAX_NAMED_ROWS]

    @property
    def seen(self) -> int:
        """Rows that were encoded."""
        return self.kept + self.dropped.total() + self.bad.total()

    def rows(self, summary: Summary) -> dict[str, Any]:
        """Counts of all rows that were read."""
        dropped = dict(sorted(self.dropped.items()))
        return {
            "read": summary.rows,
            "bad": dict(sorted((Counter(summary.bad) + self.bad).items())),
            "not_drawn": self.not_drawn,
            "dropped": dropped,
            "truncated": self.truncated,
            "kept": sum(summary.kept.values()) - self.not_drawn - self.bad.total() - sum(dropped.values()),
        }

    def named_rows(self, summary: Summary) -> list[str]:
        """The first rows that are left out."""
        return [*summary.named, *self.named_bad, *self.named][:MAX_NAMED_ROWS]


def refuse_losses(job: DatasetSpec, summary: Summary, outcome: Outcome, total: int) -> None:
    """Raise DataError when encoding leaves out more of the `total` rows that it was given than the spec allows."""
    bad = Counter(summary.bad) + outcome.bad
    allowed = job.max_bad_fraction
    if bad.total() > allowed * summary.rows:
        raise too_many_bad_rows(bad, summary.rows, allowed, [*outcome.named_bad, *summary.named])
    # By themselves too: rows that `max_rows` did not draw are not encoded and would dilute the share.
    if outcome.bad.total() > allowed * total:
        raise too_many_bad_rows(outcome.bad, total, allowed, outcome.named_bad)
    cut_off = outcome.dropped[CUT_OFF] + outcome.dropped[EQUAL_ANSWERS]
    if cut_off > MAX_CUT_OFF_FRACTION * total:
        what = "what tells the answers apart" if job.objective == "dpo" else "every token with loss"
        raise DataError(
            f"dataset.cutoff_len: {job.cutoff_len} cuts off {what} of {cut_off} of "
            f"{total} rows; use a larger one; first: {outcome.named[0]}"
        )
