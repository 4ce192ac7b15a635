"""What a stage tells while it runs."""

import logging

import pytest

from flows import reporting
from flows.reporting import StageReporter


def test_the_log_of_a_run_has_few_lines_of_a_long_training(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    now = 0.0
    monkeypatch.setattr(reporting.time, "monotonic", lambda: now)
    monkeypatch.setattr(StageReporter, "_tell_prefect", lambda self, call: None)
    reporter = StageReporter("train", logging.getLogger("test.reporting"))
    with caplog.at_level(logging.INFO, logger="test.reporting"):
        for step in range(1, 1001):
            now += 0.125  # seconds for a step: half a minute is 240 of them
            evaluated = {"eval_loss": 2.5} if step == 450 else {}
            reporter.progress(step, 1000, step=step, loss=1.5, **evaluated)
    steps = [record.message.partition("/")[0] for record in caplog.records]
    assert steps == ["240", "450", "690", "930", "1,000"]
    assert caplog.records[1].message == "450/1,000  loss 1.5  eval loss 2.5"


def test_a_stage_that_has_only_begun_says_so_to_prefect(monkeypatch: pytest.MonkeyPatch):
    told = []
    monkeypatch.setattr(StageReporter, "_update_artifact", lambda self, percent, text: told.append((percent, text)))
    StageReporter("download", logging.getLogger("test.reporting")).progress(0, None)
    assert told == [(0.0, "started")]
