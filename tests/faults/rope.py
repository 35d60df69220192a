"""Rotary positions: which entries turn, how fast, from where."""

import mlx.core as mx
from faults.fault import CHUNKS, FULL, K3, A, Fault, patched

import qwen35.attention


def rotated(change, traditional=False):
    """Return a patch that rotates by change(head size, rotary_dim, theta, offset)."""

    def wrap(real):
        def wrong(x, rotary_dim, theta, offset):
            dim, base, start = change(x.shape[-1], rotary_dim, theta, offset)
            return mx.fast.rope(x, dim, traditional=traditional, base=base, scale=1.0, offset=start)

        return wrong

    return patched(qwen35.attention, "rope", wrap)


FAULTS = {
    "rope on the wrong fraction": Fault(
        rotated(lambda size, dim, theta, offset: (2 * dim, theta, offset)), f"{FULL}{A}q_rope"
    ),
    "rope interleaved": Fault(
        rotated(lambda size, dim, theta, offset: (dim, theta, offset), traditional=True),
        f"{FULL}{A}q_rope",
    ),
    "rope one position late": Fault(
        rotated(lambda size, dim, theta, offset: (dim, theta, offset + (offset > 0))),
        f"{FULL}{A}q_rope",
        CHUNKS,
        step=1,
    ),
    "theta hard-wired": Fault(
        rotated(lambda size, dim, theta, offset: (dim, 10_000_000, offset)),
        f"layers.1.{A}q_rope",
        K3,
    ),
    "fraction hard-wired": Fault(
        rotated(lambda size, dim, theta, offset: (size // 4, theta, offset)),
        f"layers.1.{A}q_rope",
        K3,
    ),
}
