"""Fixtures that every test may use."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.ranks import RankPool


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[..., list[Any]]]:
    """`ranks(world_size, fn, *args)` runs a module-level function in forked ranks and returns their values."""
    pool = RankPool()
    yield pool.run_ranks
    pool.close()
