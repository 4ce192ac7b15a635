"""Random choices about rows: a function of the seed and the rows alone.

They use raw 64-bit output of PCG64 and BLAKE3, whose streams are fixed for ever (numpy's higher-level `permutation` may
change between releases), and never the number of workers, the order in which they finish, or PYTHONHASHSEED.
"""

from collections import defaultdict
from collections.abc import Sequence

import numpy as np
from blake3 import blake3

from mca_lib.errors import DataError


def permutation(n: int, seed: int, purpose: str) -> np.ndarray:
    """int64 [n]: a random order of 0..n-1; choices with different purposes are independent."""
    generator = np.random.PCG64([seed, *purpose.encode("ascii")])
    return np.argsort(generator.random_raw(n), kind="stable")


def hold_out(tokens: Sequence[bytes], contents: Sequence[bytes], fraction: float, seed: int) -> np.ndarray:
    """bool [n]: which rows are held out, given digests of each row's tokens and of its text.

    Rows of equal tokens go to one side together, so no held-out row was seen in training. Which rows are held out hangs
    on a hash of their text: the same rows whatever the template and the cutoff, and changing one row moves hardly any
    other. At least one row is held out when there are two and `fraction` > 0.

    Raises:
        DataError: all rows are equal, so that nothing can be held out.
    """
    rows = len(tokens)
    held_out = np.zeros(rows, dtype=bool)
    if fraction == 0 or rows < 2:
        return held_out
    groups: defaultdict[bytes, list[int]] = defaultdict(list)
    for row, digest in enumerate(tokens):
        groups[digest].append(row)
    if len(groups) == 1:
        raise DataError(f"all {rows} rows are equal: none can be held out; set dataset.eval_fraction to 0")
    wanted = min(max(1, round(fraction * rows)), rows - 1)
    prefix = b"%d:" % seed
    order = sorted(groups.values(), key=lambda group: blake3(prefix + min(contents[i] for i in group)).digest())
    count = 0
    for group in order:
        # A group of equal rows that is too big for the rest stays in training.
        if count + len(group) <= wanted:
            held_out[group] = True
            count += len(group)
    if count == 0:
        held_out[min(order, key=len)] = True
    return held_out


def hold_out_keys(contents: Sequence[bytes], seed: int) -> np.ndarray:
    """uint64 [n]: the beginning of the hash by which `hold_out` orders rows, given digests of their texts."""
    prefix = b"%d:" % seed
    return np.array([int.from_bytes(blake3(prefix + c).digest(length=8)) for c in contents], dtype=np.uint64)


def held_out_keys(keys_N: np.ndarray, fraction: float, limit: int) -> np.ndarray:
    """uint64: keys (uint64 [n], of `hold_out_keys`) of the rows to hold out, sorted; at most `limit` rows.

    The rows that `hold_out` would take, from 8 bytes a row: equal texts have equal keys, so they go to one side.

    Raises:
        DataError: all rows are equal, so that nothing can be held out.
    """
    rows = len(keys_N)
    if fraction == 0 or rows < 2:
        return keys_N[:0]
    groups, sizes = np.unique(keys_N, return_counts=True)
    if len(groups) == 1:
        raise DataError(f"all {rows} rows are equal: none can be held out; set dataset.eval_fraction to 0")
    wanted = min(max(1, round(fraction * rows)), rows - 1, limit)
    taken, count = [], 0
    for index, size in enumerate(sizes.tolist()):
        if count + size <= wanted:
            taken.append(index)
            count += size
        if count == wanted:
            break
    return groups[taken] if taken else groups[[int(np.argmin(sizes))]]
