"""Counts of tokens, one a row: kept as plain numbers, so that no lazy graph grows behind them."""

from collections.abc import Sequence

import numpy as np

from qwen35.errors import CacheError

Counts = int | np.ndarray
"""An int where all rows agree, else int64 [B]. Arrays are never written to: sums make new ones."""


def settled(counts: Counts) -> Counts:
    """Return an int where all rows agree."""
    if isinstance(counts, int) or np.any(counts != counts[0]):
        return counts
    return int(counts[0])


def of_rows(counts: Counts, rows: int) -> np.ndarray:
    """Return int64 [B]."""
    return np.broadcast_to(np.asarray(counts, np.int64), (rows,))


def checked(name: str, value: int | Sequence[int] | np.ndarray, rows: int, most: Counts) -> Counts:
    """Return `value`, one count for all rows or one a row, each from 0 to `most`.

    Raises CacheError that begins with `name`.
    """
    given = np.asarray(value)
    if given.dtype.kind not in "iu" or given.ndim > 1:
        raise CacheError(f"{name} is {value!r}: give a whole number, or one for each row.")
    if given.ndim == 1 and len(given) != rows:
        raise CacheError(f"{name} has {len(given)} entries for {rows} rows: give one for each row.")
    each, limit = of_rows(given, rows), of_rows(most, rows)
    if len(bad := np.flatnonzero((each < 0) | (each > limit))):
        row = int(bad[0])
        raise CacheError(
            f"{name} is {each[row]} in row {row}: it can be from 0 to {limit[row]} there."
        )
    return settled(each.copy())
