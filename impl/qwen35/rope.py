"""Rotary positions on the first `rotary_dim` entries of each head (split halves)."""

import mlx.core as mx
from jaxtyping import Float


def rope(
    x: Float[mx.array, "B Hx S D"], rotary_dim: int, theta: float, offset: int
) -> Float[mx.array, "B Hx S D"]:
    """Rotate pairs (i, i + rotary_dim/2) of token t by (offset+t)·theta^(−2i/rotary_dim)."""
    return mx.fast.rope(x, rotary_dim, traditional=False, base=theta, scale=1.0, offset=offset)
