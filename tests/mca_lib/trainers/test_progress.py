"""What a run keeps of its log, and what a crash may do to the files beside the checkpoints."""

import json
from pathlib import Path

import pytest

from mca_lib.trainers import peak
from mca_lib.trainers.names import LOG_NAME
from mca_lib.trainers.progress import CURVE_POINTS, curve, read_log

SPOILT = [b"", b'{"step": 3, "lo', b"\xff\xfe{", b"\0" * 99, b"null", b"5", b"{}", b'{"step": null}']


@pytest.mark.parametrize("steps", [0, 1, 2, CURVE_POINTS, CURVE_POINTS + 1, 1000])
def test_a_curve_has_few_points_and_both_ends(steps):
    lines = [{"step": step, "loss": 1 / step} for step in range(1, steps + 1)] + [{"step": steps, "eval_loss": 0.5}]
    points = curve(lines, "loss")
    assert len(points) <= CURVE_POINTS
    assert len(points) >= min(steps, CURVE_POINTS / 2)
    assert [*points][:1] + [*points][-1:] == ([1, steps] if steps else [])
    assert curve(lines, "eval_loss") == {steps: 0.5}


@pytest.mark.parametrize("spoilt", SPOILT)
def test_a_log_is_read_without_what_a_crash_has_spoilt(tmp_path: Path, spoilt: bytes):
    lines = [{"step": step, "loss": 2.5} for step in (1, 2)]
    one, two = (json.dumps(line).encode() for line in lines)
    (tmp_path / LOG_NAME).write_bytes(b"\n".join([one, spoilt, two, spoilt]))
    assert read_log(tmp_path) == lines


@pytest.mark.parametrize("spoilt", [*SPOILT, b'{"step": 0}'])
def test_a_peak_that_cannot_be_read_is_measured_anew(tmp_path: Path, spoilt: bytes):
    (tmp_path / peak.NAME).write_bytes(spoilt)
    assert peak._known(tmp_path / peak.NAME) == {}
