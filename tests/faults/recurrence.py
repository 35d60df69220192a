"""The gated delta rule: its decay, its state, and which heads and rows meet."""

import mlx.core as mx
from faults.fault import BF16, Fault, L, patched

import qwen35.delta_net


def decay(change):
    """Return a patch that computes g by change(real, A_log, a, dt_bias)."""
    return patched(qwen35.delta_net, "decay", lambda real: lambda *inputs: change(real, *inputs))


def update(change):
    return patched(qwen35.delta_net, "gated_delta_update", change)


def heads_tiled(real):
    def tiled(q, k, v, g, beta, state, *mask):
        repeats = v.shape[2] // k.shape[2]
        q, k = (mx.tile(x, (1, 1, repeats, 1)) for x in (q, k))
        return real(q, k, v, g, beta, state, *mask)

    return tiled


def state(change):
    """Return a patch that keeps change(state) of each forward."""

    def wrap(real):
        def changed(*inputs):
            y, new = real(*inputs)
            return y, change(new)

        return changed

    return update(wrap)


def through_bf16(x):
    return x.astype(mx.bfloat16).astype(x.dtype)


FAULTS = {
    "decay left out": Fault(
        decay(lambda real, A_log, a, dt_bias: mx.ones(a.shape, mx.float32)), f"layers.0.{L}g"
    ),
    "dt_bias left out": Fault(
        decay(lambda real, A_log, a, dt_bias: real(A_log, a, 0 * dt_bias)), f"layers.0.{L}g"
    ),
    # g's error goes from 6.0e-4 to 1.4e-3; 16 times transformers' 3.4e-4 is allowed for, as MLX's
    # softplus in bfloat16 needs that in some layers.
    "g rounded to bf16": Fault(
        decay(lambda real, *inputs: through_bf16(real(*inputs))),
        f"layers.0.{L}g",
        BF16,
        transformers_too=False,
    ),
    "state in bf16": Fault(
        state(lambda x: x.astype(mx.bfloat16)), f"layers.0.{L}recurrent_state", verdict="dtype"
    ),
    # From 8.0e-3 to 8.4e-3, transformers' own being 6.4e-3: rounded q, k, v and beta weigh more.
    "state rounded to bf16, kept in f32": Fault(
        state(through_bf16), f"layers.0.{L}recurrent_state", BF16, transformers_too=False
    ),
    "heads repeated by tiling": Fault(update(heads_tiled), f"layers.0.{L}y"),
    "states of other rows": Fault(state(lambda x: x[::-1]), f"layers.0.{L}recurrent_state"),
}
