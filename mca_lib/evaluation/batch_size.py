"""How many rows go through a model at once."""

from collections.abc import Callable
from typing import Literal

from mca_lib.errors import ResourceError


def fitting[T](run: Callable[[int], T], batch_size: int | Literal["auto"], largest: int) -> T:
    """`run(batch_size)`; with "auto" the largest size that fits into the memory, by halves of `largest`."""
    if batch_size != "auto":
        return run(batch_size)
    from accelerate.utils.memory import clear_device_cache, should_reduce_batch_size

    size = largest
    while True:
        try:
            return run(size)
        except Exception as error:
            if not should_reduce_batch_size(error):
                raise
        if size == 1:
            raise ResourceError("eval.batch_size: not even one row fits into the memory; shorten the rows")
        clear_device_cache(garbage_collection=True)  # what the error held is free now
        size //= 2
