"""Rotary positions on the first `rotary_dim` entries of each head (split halves)."""

import mlx.core as mx
from jaxtyping import Float, Int


def rope(
    x: Float[mx.array, "B Hx S D"],
    rotary_dim: int,
    theta: float,
    offset: int | Int[mx.array, "B"],
) -> Float[mx.array, "B Hx S D"]:
    """Rotate pairs (i, i + rotary_dim/2) of token t by (offset+t)·theta^(−2i/rotary_dim).

    An offset for each row gives the bits of that number for all.
    """
    return mx.fast.rope(x, rotary_dim, traditional=False, base=theta, scale=1.0, offset=offset)
