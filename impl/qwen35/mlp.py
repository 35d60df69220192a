"""The SwiGLU block."""

from functools import partial

import mlx.core as mx
import mlx.nn as nn
from jaxtyping import Float

from qwen35.forward import PLAIN, Forward
from qwen35.tap import Tap, untapped


@partial(mx.compile, shapeless=True)
def swiglu(gate: mx.array, up: mx.array) -> mx.array:
    """silu(gate)·up as one kernel, in the working dtype."""
    return gate * mx.sigmoid(gate) * up


class MLP(nn.Module):
    """down(silu(gate(x))·up(x))."""

    def __init__(self, hidden: int, intermediate: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, intermediate, bias=False)
        self.up_proj = nn.Linear(hidden, intermediate, bias=False)
        self.down_proj = nn.Linear(intermediate, hidden, bias=False)

    def __call__(
        self, x: Float[mx.array, "B S H"], tap: Tap = untapped, forward: Forward = PLAIN
    ) -> Float[mx.array, "B S H"]:
        """Taps `gate`, `up`, `act` and `out`."""
        gate = tap("gate", forward.project(self.gate_proj, x))
        up = tap("up", forward.project(self.up_proj, x))
        act = tap("act", swiglu(gate, up))
        return tap("out", forward.project(self.down_proj, act))
