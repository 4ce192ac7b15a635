"""Curves as a picture."""

import math
import re
from xml.etree import ElementTree

from mca_lib.evaluation.chart import HEIGHT, WIDTH, Series, line_chart

SVG = "{http://www.w3.org/2000/svg}"


def points(svg: str) -> list[list[tuple[float, float]]]:
    """Pixels of each drawn curve."""
    paths = [e.get("d") for e in ElementTree.fromstring(svg).iter(f"{SVG}path") if e.get("stroke-width")]
    return [[tuple(map(float, pair)) for pair in re.findall(r"([\d.]+) ([\d.]+)", path)] for path in paths]


def test_values_become_pixels_in_proportion():
    (curve,) = points(line_chart("loss", [Series("training", [(0, 4.0), (5, 3.0), (10, 0.0)])]))
    (x0, y0), (x1, y1), (x2, y2) = curve
    assert x1 - x0 == x2 - x1 > 0
    assert math.isclose(y2 - y1, 3 * (y1 - y0), abs_tol=0.2)  # pixels are rounded to a tenth
    assert 0 < y0 < y2 < HEIGHT
    assert x2 < WIDTH


def test_a_value_that_is_not_there_interrupts_the_curve():
    gap = Series("training", [(1, 1.0), (2, 2.0), (3, None), (4, 2.0), (5, 1.0), (6, None), (7, 1.5)])
    svg = line_chart("loss", [gap])
    assert [len(curve) for curve in points(svg)] == [2, 2]
    assert svg.count("<circle") == 1, "a point alone is a dot"


def test_marks_are_round_numbers():
    svg = line_chart("loss", [Series("training", [(1, 0.013), (100, 0.087)])])
    texts = [e.text for e in ElementTree.fromstring(svg).iter(f"{SVG}text")]
    assert texts[:4] == ["0.02", "0.04", "0.06", "0.08"]
    assert {"20", "40", "60", "80", "100", "training"} <= set(texts)


def test_odd_curves_are_drawn_or_left_out():
    assert line_chart("loss", []) == ""
    assert line_chart("loss", [Series("training", [(1, None)])]) == ""
    for value in (0.0, 3.0, -2.0, 1e-12):
        ElementTree.fromstring(line_chart("loss", [Series("constant", [(1, value), (2, value)])]))
    assert "<circle" in line_chart("loss", [Series("one", [(7, 1.0)])])


def test_names_are_escaped():
    svg = line_chart('<script>"', [Series("<b>", [(1, 1.0), (2, 2.0)])])
    root = ElementTree.fromstring(svg)
    assert "<b>" in [e.text for e in root.iter(f"{SVG}text")]
    assert root.get("aria-label") == '<script>": <b>'
