"""Threads that carry tensors, each with one tensor's memory. torch, the disk and the digests all let go of the GIL."""

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

import torch

WORKERS = 2


def for_each[T](items: Iterable[T], work: Callable[[T], None], workers: int = WORKERS) -> None:
    """Call `work` with every item, in order, `workers` at a time; the first error ends it and is raised."""
    queue, lock, stop = iter(items), threading.Lock(), threading.Event()

    def run() -> None:
        try:
            while not stop.is_set():
                with lock:
                    try:
                        item = next(queue)
                    except StopIteration:
                        return
                work(item)
        except BaseException:
            stop.set()
            raise

    with one_thread_per_operation(), ThreadPoolExecutor(workers) as pool:
        jobs = [pool.submit(run) for _ in range(workers)]
    for job in jobs:
        job.result()


@contextlib.contextmanager
def one_thread_per_operation() -> Iterator[None]:
    """Workers divide the cores among themselves; threads within an operation would only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class Scratch:
    """Each thread's memory for one tensor, used again for the next: fresh pages cost more than the reading."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._local = threading.local()

    def tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Uninitialized; valid until the thread asks for the next."""
        if not hasattr(self._local, "buffer"):
            self._local.buffer = torch.empty(self._max_bytes, dtype=torch.uint8)
        count = torch.Size(shape).numel() * dtype.itemsize
        return self._local.buffer[:count].view(dtype).view(shape)
