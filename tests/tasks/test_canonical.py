"""One value has one text, and what has no text is refused with the name of its field."""

import enum
from pathlib import Path

import numpy as np
import pytest

from tasks.canonical import canonical, canonical_json, flatten, stage_key
from tasks.errors import CanonicalError


class Color(enum.StrEnum):
    RED = "red"


def test_order_of_keys_does_not_matter() -> None:
    assert canonical_json({"b": 1, "a": [{"d": 1, "c": 2}]}) == canonical_json({"a": [{"c": 2, "d": 1}], "b": 1})


def test_order_of_a_list_matters() -> None:
    assert canonical_json([1, 2]) != canonical_json([2, 1])


@pytest.mark.parametrize(
    ("one", "other"), [(1, 1.0), (1, True), (0, False), ("1", 1), (None, "null"), ([], {}), ("\u00e9", "e\u0301")]
)
def test_different_values_have_different_texts(one: object, other: object) -> None:
    assert canonical_json(one) != canonical_json(other)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (-0.0, "0.0"),
        (1e-5, "1e-05"),
        (1e22, "1e+22"),
        (2**70, "1180591620717411303424"),
        ((1, (2,)), "[1,[2]]"),
        ("ü\n", '"\\u00fc\\n"'),
        ({"b": None, "a": True}, '{"a":true,"b":null}'),
    ],
)
def test_text(value: object, text: str) -> None:
    assert canonical_json(value) == text


@pytest.mark.parametrize(
    "value",
    [
        float("nan"),
        float("inf"),
        {1, 2},
        Path("/x"),
        b"bytes",
        print,
        object(),
        Color.RED,
        np.float64(1.0),
        np.int64(1),
        {1: "key"},
        {Color.RED: "key"},
    ],
)
def test_value_without_a_canonical_form_is_refused_with_its_field(value: object) -> None:
    with pytest.raises(CanonicalError, match=r"^train\.identity\.lora\.target\[1\]") as caught:
        canonical_json({"identity": {"lora": {"target": ["x", value]}}}, "train")
    assert "\n" not in str(caught.value)


def test_canonical_is_a_fixed_point_of_json() -> None:
    value = {"a": (1, 2.0), "b": {"c": -0.0}}
    assert canonical_json(canonical(value)) == canonical_json(value)


def test_key_is_the_same_in_every_release() -> None:
    payload = {"stage": "train", "version": 1, "identity": {"learning_rate": 1e-5}, "inputs": {"model": "ab"}}
    assert stage_key(payload) == "fae09e8effea46c4f5243567631fe449"


def test_flatten_names_leaves_as_a_person_would() -> None:
    value = {"identity": {"rate": 1.0, "modules": ["q", "v"], "files": [{"digest": "a"}], "none": {}}, "inputs": {}}
    assert flatten(value) == {
        "identity.rate": 1.0,
        "identity.modules": ["q", "v"],
        "identity.files.0.digest": "a",
        "identity.none": {},
        "inputs": {},
    }
