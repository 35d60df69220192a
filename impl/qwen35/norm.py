"""The norms: RMS norm of the stream, of q and k in the linear layers, and the gated one."""

from functools import partial
from typing import Literal

import mlx.core as mx
import mlx.nn as nn
from jaxtyping import Float

QK_EPS = 1e-6


def normalize_qk(
    q: Float[mx.array, "B S Hk Dk"], k: Float[mx.array, "B S Hk Dk"], eps_on: Literal["mean", "sum"]
) -> tuple[Float[mx.array, "B S Hk Dk"], Float[mx.array, "B S Hk Dk"]]:
    """Scale k to length 1 and q to length Dk^-1/2, in their own dtype.

    With s = Dk^-1/2, x/|x| = s·rms_norm(x), and the readout scale s folds into q. An eps on the sum
    of squares is eps·s² on their mean.
    """
    s = k.shape[-1] ** -0.5
    eps = QK_EPS * s**2 if eps_on == "sum" else QK_EPS
    return s**2 * mx.fast.rms_norm(q, None, eps), s * mx.fast.rms_norm(k, None, eps)


@partial(mx.compile, shapeless=True)
def _silu_gate(z: mx.array, normed: mx.array, like: mx.array) -> mx.array:
    gate = z.astype(mx.float32)
    return (gate * mx.sigmoid(gate) * normed.astype(mx.float32)).astype(like.dtype)


class GatedRMSNorm(nn.Module):
    """silu(z) · rms_norm(y)·γ over the last axis, the product in f32, cast to y's dtype.

    γ is stored as it is in both checkpoint generations.
    """

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = mx.ones(size)
        self.eps = eps

    def __call__(
        self, y: Float[mx.array, "B S Hv Dv"], z: Float[mx.array, "B S Hv Dv"]
    ) -> Float[mx.array, "B S Hv Dv"]:
        """Normalize y and gate it by z."""
        return _silu_gate(z, mx.fast.rms_norm(y, self.weight, self.eps), y)
