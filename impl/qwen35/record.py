"""What a speculative round remembers: references alone, as arrays are immutable."""

from dataclasses import dataclass

import mlx.core as mx

from qwen35.counts import Counts


@dataclass(frozen=True)
class Record:
    """One linear layer's verify forward: the slots it replaced and the inputs it advanced by.

    `conv_tail` [B, K-1, C] and `recurrent_state` [B, Hv, Dv, Dk] are None for zeros; `qkv`
    [B, S, C], after masking, `a` and `b` [B, S, Hv].
    """

    conv_tail: mx.array | None
    recurrent_state: mx.array | None
    offset: Counts
    qkv: mx.array
    a: mx.array
    b: mx.array


@dataclass(frozen=True)
class Round:
    """An armed round: (width, offset) of each attention layer before it, None for a linear layer.

    `verified` counts the tokens of the verify forward, None before there was one.
    """

    before: tuple[tuple[int, Counts] | None, ...]
    verified: Counts | None = None
