"""Who gets the memory settings of CPU ranks; tests/mca_lib/test_launch.py has what they do."""

import platform

import pytest

from mca_lib.heap import TUNABLES, heap_settings


def test_every_tunable_is_named_once():
    (value,) = heap_settings({"PATH": "/usr/bin"}).values()
    assert dict(pair.split("=") for pair in value.split(":")) == {name: str(n) for name, n in TUNABLES.items()}


@pytest.mark.parametrize("name", ["GLIBC_TUNABLES", "MALLOC_ARENA_MAX", "MALLOC_MMAP_THRESHOLD_"])
def test_a_setting_of_the_users_own_wins(name):
    assert heap_settings({name: ""}) == {}


def test_another_c_library_is_left_alone(monkeypatch):
    monkeypatch.setattr(platform, "libc_ver", lambda: ("", ""))
    assert heap_settings({}) == {}
