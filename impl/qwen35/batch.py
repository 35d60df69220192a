"""Rows of a layer's cache: chosen, and joined with those of others. Both make a new entry."""

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from qwen35.counts import of_rows, settled
from qwen35.errors import CacheError
from qwen35.layer_cache import DeltaCache, KVCache, LayerCache


def chosen(entry: LayerCache, rows: Sequence[int], of: int) -> LayerCache:
    """Return rows `rows` of `of`, in that order; columns that are padding in all of them go."""
    index = mx.array(list(rows), mx.int32)
    offset = of_rows(entry.offset, of)[list(rows)]
    if isinstance(entry, DeltaCache):
        new = DeltaCache()
        new.conv_tail, new.recurrent_state = (
            None if x is None else x[index] for x in (entry.conv_tail, entry.recurrent_state)
        )
        new.offset = settled(offset)
        return new
    keys, values = (None if x is None else x[index] for x in (entry.keys, entry.values))
    kept = KVCache(keys, values, settled(offset))
    kept.realign(kept.left_padding, kept.offset, int(offset.max()))
    return kept


def joined(entries: Sequence[LayerCache], rows: Sequence[int]) -> LayerCache:
    """Return the entries' rows, `rows[i]` of entry i, below each other.

    Linear layers without a state get zeros; the narrower attention caches get left padding.
    """
    offset = settled(
        np.concatenate([of_rows(e.offset, n) for e, n in zip(entries, rows, strict=True)])
    )
    deltas = [entry for entry in entries if isinstance(entry, DeltaCache)]
    if len(deltas) == len(entries):
        new = DeltaCache()
        new.conv_tail = stacked([e.conv_tail for e in deltas], rows)
        new.recurrent_state = stacked([e.recurrent_state for e in deltas], rows)
        new.offset = offset
        return new
    if deltas:
        raise CacheError("the caches have linear layers in different places: join one model's.")
    attention = [entry for entry in entries if isinstance(entry, KVCache)]
    width = max(entry.width for entry in attention)
    keys = stacked([left_padded(e.keys, width) for e in attention], rows)
    values = stacked([left_padded(e.values, width) for e in attention], rows)
    return KVCache(keys, values, offset)


def left_padded(x: mx.array | None, width: int) -> mx.array | None:
    """Return x [B, Hkv, T, D] with zero columns before it, `width` in all."""
    if x is None or x.shape[2] == width:
        return x
    return mx.pad(x, [(0, 0), (0, 0), (width - x.shape[2], 0), (0, 0)])


def stacked(parts: Sequence[mx.array | None], rows: Sequence[int]) -> mx.array | None:
    """Concatenate along the rows, zeros for None. Raises CacheError where they do not fit."""
    known = [part for part in parts if part is not None]
    if not known:
        return None
    shape, dtype = known[0].shape[1:], known[0].dtype
    for part in known:
        if (part.shape[1:], part.dtype) != (shape, dtype):
            raise CacheError(
                f"caches of {shape} {dtype} and {part.shape[1:]} {part.dtype} a row: join caches "
                "of one model in one dtype."
            )
    filled = [
        mx.zeros((n, *shape), dtype) if part is None else part
        for part, n in zip(parts, rows, strict=True)
    ]
    return mx.concatenate(filled, axis=0)
