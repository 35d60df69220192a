"""The gated delta rule, token by token (Yang et al., Gated Delta Networks, arXiv 2412.06464).

For each value head, with state S [Dv, Dk] in f32, decay g and write strength β:

    S ← g·S;  d = β·(v − S·k);  S ← S + d⊗k;  y = S·q
"""

from functools import partial

import mlx.core as mx
from jaxtyping import Bool, Float, Int


@partial(mx.compile, shapeless=True)
def decay(
    A_log: Float[mx.array, "Hv"], a: Float[mx.array, "B S Hv"], dt_bias: Float[mx.array, "Hv"]
) -> Float[mx.array, "B S Hv"]:
    """g = exp(−exp(A_log)·softplus(a + dt_bias)) in f32; the softplus in a's dtype."""
    rate = mx.exp(A_log.astype(mx.float32))
    return mx.exp(-rate * mx.logaddexp(a + dt_bias, 0))


def _written(k: mx.array, v: mx.array, g: mx.array, beta: mx.array, state: mx.array) -> mx.array:
    """The state after one token of every row and value head."""
    k_row = k[..., None, :]
    state = state * g[..., None, None]
    d = (v - (state * k_row).sum(axis=-1)) * beta[..., None]
    return state + k_row * d[..., None]


_state_token = mx.compile(_written)


@mx.compile
def _token(
    q: mx.array, k: mx.array, v: mx.array, g: mx.array, beta: mx.array, state: mx.array
) -> tuple[mx.array, mx.array]:
    """One token of every row and value head; q and k [B, Hv, Dk], v [B, Hv, Dv], g, β [B, Hv]."""
    state = _written(k, v, g, beta, state)
    return (state * q[..., None, :]).sum(axis=-1).astype(q.dtype), state


def gated_delta_update(
    q: Float[mx.array, "B S Hk Dk"],
    k: Float[mx.array, "B S Hk Dk"],
    v: Float[mx.array, "B S Hv Dv"],
    g: Float[mx.array, "B S Hv"],
    beta: Float[mx.array, "B S Hv"],
    state: Float[mx.array, "B Hv Dv Dk"],
    mask: Bool[mx.array, "B S"] | None = None,
) -> tuple[Float[mx.array, "B S Hv Dv"], Float[mx.array, "B Hv Dv Dk"]]:
    """Run S tokens; return (y in q's dtype, the new state in f32).

    Key head h serves value heads h·Hv/Hk … (h+1)·Hv/Hk − 1. Where `mask` is false the state stays
    and y is undefined.
    """
    if (repeats := v.shape[2] // k.shape[2]) > 1:
        q, k = mx.repeat(q, repeats, axis=2), mx.repeat(k, repeats, axis=2)
    outputs = []
    for t in range(q.shape[1]):
        y, new = _token(q[:, t], k[:, t], v[:, t], g[:, t], beta[:, t], state)
        state = new if mask is None else mx.where(mask[:, t, None, None, None], new, state)
        outputs.append(y)
    return mx.stack(outputs, axis=1), state


def state_only_update(
    k: Float[mx.array, "B S Hk Dk"],
    v: Float[mx.array, "B S Hv Dv"],
    g: Float[mx.array, "B S Hv"],
    beta: Float[mx.array, "B S Hv"],
    state: Float[mx.array, "B Hv Dv Dk"],
    ends: Int[mx.array, "B"] | None = None,
) -> Float[mx.array, "B Hv Dv Dk"]:
    """Return the state that `gated_delta_update` leaves, bit for bit; neither q nor y is needed.

    Row r stops after `ends[r]` tokens, all S of them where `ends` is None.
    """
    if (repeats := v.shape[2] // k.shape[2]) > 1:
        k = mx.repeat(k, repeats, axis=2)
    for t in range(k.shape[1]):
        new = _state_token(k[:, t], v[:, t], g[:, t], beta[:, t], state)
        state = new if ends is None else mx.where((t < ends)[:, None, None, None], new, state)
    return state
