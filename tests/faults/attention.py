"""Full attention: its gate, its scale, its mask."""

import mlx.core as mx
from faults.fault import FULL, A, Fault, Namespace

import qwen35.attention


def gate_before_query(mp):
    def split(x, where, axis):
        first, second = mx.split(x, where, axis=axis)
        return second, first

    mp.setattr(qwen35.attention, "mx", Namespace(split=split))


def attend(**changes):
    """Return a patch that calls the attention with other arguments."""

    def patch(mp):
        attention = lambda *args, **options: mx.fast.scaled_dot_product_attention(
            *args, **(options | changes)
        )
        fast = Namespace(mx.fast, scaled_dot_product_attention=attention)
        mp.setattr(qwen35.attention, "mx", Namespace(fast=fast))

    return patch


FAULTS = {
    "gate and query halves swapped": Fault(gate_before_query, f"{FULL}{A}q_proj"),
    "scores not scaled": Fault(attend(scale=1.0), f"{FULL}{A}attention"),
    "attention not causal": Fault(attend(mask=None), f"{FULL}{A}attention"),
}
