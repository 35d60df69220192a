"""What all layers of one forward share: lengths, masks and positions, made once."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import mlx.core as mx
import numpy as np
from jaxtyping import Bool, Float, Int

from qwen35.counts import Counts, of_rows, settled
from qwen35.errors import CacheError
from qwen35.layer_cache import KVCache, LayerCache

MOST_INDEPENDENT = 4
"""Tokens a forward with independent rows may append."""

KERNEL_CHANGE = 1024
"""From this many keys on, attention kernels change at every power of two."""


@dataclass(frozen=True)
class Forward:
    """The facts of one forward; the defaults are those of a batch without padding.

    `lengths` [B] counts each row's real tokens and `real` [B, S] marks them; None where all S are.
    With right padding, `right_padding` [B] counts that, and `ends` [B] int32 is `lengths`.
    `positions` [B] int32 is each row's RoPE offset, None for the cache's own. `attention_mask`
    [B, 1, S, T] is true where a query sees a key, None for plainly causal. With `independent_rows`
    every position is computed with the arithmetic of one row of one token.
    """

    lengths: np.ndarray | None = None
    right_padding: np.ndarray | None = None
    ends: mx.array | None = None
    real: mx.array | None = None
    positions: mx.array | None = None
    attention_mask: mx.array | None = None
    independent_rows: bool = False

    def project(self, layer: Callable[[mx.array], mx.array], x: mx.array) -> mx.array:
        """Apply a projection to [B, S, …]."""
        return one_by_one(layer, x) if self.independent_rows else layer(x)


PLAIN = Forward()


def make_forward(
    layers: Sequence[LayerCache],
    rows: int,
    tokens: int,
    lengths: Counts,
    padding: Literal["left", "right"] = "right",
    independent_rows: bool = False,
) -> Forward:
    """Return the facts of a forward of `tokens` columns, of which `lengths` are a row's tokens.

    Left padding is entered into the attention layers' caches. Raises CacheError where that or
    independent rows cannot be had.
    """
    ragged = bool(np.any(lengths != tokens))
    each = of_rows(lengths, rows)
    if ragged and padding == "left":
        pad_left(layers, tokens - each)
    attention = next((entry for entry in layers if isinstance(entry, KVCache)), None)
    if independent_rows:
        check_independent(tokens, 0 if attention is None else attention.width)
    right_padding = ends = real = positions = mask = None
    if ragged:
        counts = mx.array(each.astype(np.int32))
        real = token_mask(counts, tokens, padding)
        if padding == "right":
            right_padding, ends = tokens - each, counts
    if attention is not None:
        if not isinstance(attention.offset, int):
            positions = mx.array(attention.offset.astype(np.int32))
        if np.any(attention.left_padding):
            mask = attention_mask(of_rows(attention.left_padding, rows), attention.width, tokens)
    seen = each if ragged else None
    return Forward(seen, right_padding, ends, real, positions, mask, independent_rows)


def pad_left(layers: Sequence[LayerCache], padding: np.ndarray) -> None:
    """Let the first `padding` [B] columns to come be left padding of the attention caches.

    Raises CacheError if anything was seen: padding can only come before all tokens.
    """
    if any(entry.arrays() for entry in layers):
        raise CacheError("left padding after tokens were seen: pad on the right.")
    for entry in layers:
        if isinstance(entry, KVCache):
            entry.offset = settled(-padding)


def token_mask(
    lengths: Int[mx.array, "B"], tokens: int, padding: Literal["left", "right"] = "right"
) -> Bool[mx.array, "B S"]:
    """Return which of `tokens` columns are a row's tokens and not its padding."""
    columns = mx.arange(tokens)
    if padding == "right":
        return columns < lengths[:, None]
    return columns >= tokens - lengths[:, None]


def attention_mask(left_padding: np.ndarray, width: int, tokens: int) -> Bool[mx.array, "B 1 S T"]:
    """Return which keys each query sees: those up to its own column that are no left padding.

    Right padding needs no mask: it comes after every query that counts.
    """
    columns = mx.arange(width + tokens)
    causal = columns <= mx.arange(width, width + tokens)[:, None]
    return causal & (columns >= mx.array(left_padding.astype(np.int32))[:, None, None, None])


def check_independent(tokens: int, width: int) -> None:
    """Raise CacheError if appending `tokens` to `width` columns is more than tokens one by one."""
    if tokens > MOST_INDEPENDENT:
        raise CacheError(
            f"independent rows: {tokens} tokens, at most {MOST_INDEPENDENT} can be appended."
        )
    change = KERNEL_CHANGE
    while change <= width + 1:
        change *= 2
    if change <= width + tokens:
        raise CacheError(
            f"independent rows: {tokens} tokens after {width} cross a key length of {change}, "
            f"where attention kernels change. Append {change - 1 - width} first."
        )


def one_by_one(
    layer: Callable[[mx.array], mx.array], x: Float[mx.array, "B S ..."]
) -> Float[mx.array, "B S ..."]:
    """Apply `layer` to each position of each row as [1, 1, …].

    A loop, as MLX flattens a batch of one-row products with one weight into one product.
    """
    rows, tokens = x.shape[:2]
    return mx.concatenate(
        [
            mx.concatenate([layer(x[r : r + 1, t : t + 1]) for t in range(tokens)], axis=1)
            for r in range(rows)
        ],
        axis=0,
    )
