"""What a run keeps of its log."""

import pytest

from mca_lib.trainers.progress import CURVE_POINTS, curve


@pytest.mark.parametrize("steps", [0, 1, 2, CURVE_POINTS, CURVE_POINTS + 1, 1000])
def test_a_curve_has_few_points_and_both_ends(steps):
    lines = [{"step": step, "loss": 1 / step} for step in range(1, steps + 1)] + [{"step": steps, "eval_loss": 0.5}]
    points = curve(lines, "loss")
    assert len(points) <= CURVE_POINTS
    assert len(points) >= min(steps, CURVE_POINTS / 2)
    assert [*points][:1] + [*points][-1:] == ([1, steps] if steps else [])
    assert curve(lines, "eval_loss") == {steps: 0.5}
