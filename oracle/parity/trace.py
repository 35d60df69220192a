"""Traces: what a runner recorded, tensor by tensor.

Arrays are NumPy (bfloat16 through ml_dtypes) and are never copied or converted on the way in.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass
class Trace:
    """The tensors of one run, keyed by (forward, full tap name).

    `runner` is the runner's name and `info` its versions, device and precision switches.
    """

    runner: str
    layer_types: tuple[str, ...]
    info: dict[str, Any] = field(default_factory=dict)
    tensors: dict[tuple[int, str], np.ndarray] = field(default_factory=dict)

    def add(self, forward: int, tap: str, value: np.ndarray) -> np.ndarray:
        """Record one tensor and return it. A tap recorded twice is a bug in the runner."""
        if (forward, tap) in self.tensors:
            raise RuntimeError(f"{self.runner} recorded {tap} twice in forward {forward}")
        self.tensors[forward, tap] = value
        return value

    def get(self, forward: int, tap: str) -> np.ndarray | None:
        """Return the tensor, or None where the runner did not record it."""
        return self.tensors.get((forward, tap))


Feed = Callable[[int, int], np.ndarray]
"""(forward, layer) -> the residual stream [B, S, H] that layer is to be fed instead of its own."""


def feed_from(trace: Trace) -> Feed:
    """Feed each layer, and the final norm (layer = number of layers), what `trace` fed it."""
    from parity.taps import stream

    def feed(forward: int, layer: int) -> np.ndarray:
        return trace.tensors[forward, stream(layer)]

    return feed


def unfed(trace: Trace, forwards: int) -> list[tuple[int, str]]:
    """Return the (forward, tap) that `feed_from` would need and the trace lacks."""
    from parity.taps import stream

    names = [stream(layer) for layer in range(len(trace.layer_types) + 1)]
    return [(f, name) for f in range(forwards) for name in names if trace.get(f, name) is None]
