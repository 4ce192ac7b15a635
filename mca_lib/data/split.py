"""Random choices about rows: a function of the seed and the rows alone.

They use raw 64-bit output of PCG64 and BLAKE3, whose streams are fixed for ever (numpy's higher-level `permutation` may
change between releases), and never the number of workers, the order in which they finish, or PYTHONHASHSEED.
"""

from collections import Counter
from collections.abc import Sequence

import numpy as np
from blake3 import blake3

from mca_lib.errors import DataError


def permutation(n: int, seed: int, purpose: str) -> np.ndarray:
    """int64 [n]: a random order of 0..n-1; choices with different purposes are independent."""
    generator = np.random.PCG64([seed, *purpose.encode("ascii")])
    return np.argsort(generator.random_raw(n), kind="stable")


def hold_out(digests: Sequence[bytes], fraction: float, seed: int) -> np.ndarray:
    """bool [n]: which rows are held out, given a digest of each row's content.

    Rows of equal content go to one side together, so no held-out row was seen in training. Whether a row is held out
    hangs on a hash of its content: changing one row moves at most a few others. At least one row is held out when
    there are two and `fraction` > 0.

    Raises:
        DataError: all rows are equal, so that nothing can be held out.
    """
    held_out = np.zeros(len(digests), dtype=bool)
    if fraction == 0 or len(digests) < 2:
        return held_out
    size = Counter(digests)
    if len(size) == 1:
        raise DataError(f"all {len(digests)} rows are equal: none can be held out; set dataset.eval_fraction to 0")
    wanted = max(1, round(fraction * len(digests)))
    order = sorted(size, key=lambda digest: blake3(b"%d:" % seed + digest).digest())
    chosen: set[bytes] = set()
    count = 0
    for digest in order:
        # A group of equal rows that is too big for the rest stays in training; one row is always left there.
        if count + size[digest] <= min(wanted, len(digests) - 1):
            chosen.add(digest)
            count += size[digest]
    if not chosen:
        chosen = {min(order, key=lambda digest: size[digest])}
    return np.fromiter((digest in chosen for digest in digests), dtype=bool, count=len(digests))
