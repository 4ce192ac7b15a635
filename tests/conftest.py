"""Fixtures that every test may use."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests import forked_jobs as forks
from tests.ranks import RankPool


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[..., list[Any]]]:
    """`ranks(world_size, fn, *args)` runs a module-level function in forked ranks and returns their values."""
    pool = RankPool()
    yield pool.run_ranks
    pool.close()


@pytest.fixture(scope="module")
def forked_jobs(ranks: Callable[..., list[Any]]) -> Iterator[None]:
    """Jobs of stages spare their imports; see `tests.forked_jobs`."""
    with forks.forked_jobs(ranks):
        yield
