"""Taps: named points where a forward shows its tensors and may be given others instead.

A tap is a function (name, value) -> value. The forward goes on with what it returns, so the same
seam records a tensor and injects one. `untapped` returns its argument: with no tap asked for, the
graph is the one without taps.
"""

from collections.abc import Callable

import mlx.core as mx

Tap = Callable[[str, mx.array], mx.array]


def untapped(name: str, value: mx.array) -> mx.array:
    """Return the value: the tap that looks at nothing."""
    return value


def within(tap: Tap, prefix: str) -> Tap:
    """Return a tap that calls `tap` with `prefix.` before each name."""
    if tap is untapped:
        return untapped
    return lambda name, value: tap(f"{prefix}.{name}", value)
