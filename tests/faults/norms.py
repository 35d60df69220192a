"""The norms, their eps, and the residual stream that they read."""

import mlx.core as mx
import mlx.nn as nn
from faults.fault import BF16, K3, A, Fault, L, Namespace, loaded, patched

import qwen35.attention
import qwen35.delta_net
import qwen35.model
import qwen35.norm
from qwen35.semantics import PRESETS


def q_scaled_once(normalize):
    def wrong(q, k, eps_on):
        q, k = normalize(q, k, eps_on)
        return q * k.shape[-1] ** 0.5, k

    return wrong


def eps_of_the_other_version(normalize):
    return lambda q, k, eps_on: normalize(q, k, PRESETS["mlx-lm-0.31"].qk_eps)


def eps_is_1e_6(module):
    """Return a patch after which the RMS norms that a module makes ignore the config's eps."""
    wrong = Namespace(nn, RMSNorm=lambda size, eps: nn.RMSNorm(size, eps=1e-6))
    return lambda mp: mp.setattr(module, "nn", wrong)


def residual_after_norm(mp):
    def call(self, x, cache, tap=qwen35.model.untapped, *forward):
        normed = tap("input_layernorm", self.input_layernorm(x))
        mixer = self.linear_attn if self.is_linear else self.self_attn
        prefix = "linear_attn" if self.is_linear else "self_attn"
        mixed = mixer(normed, cache, qwen35.model.within(tap, prefix), *forward)
        h = tap("residual", normed + mixed)
        normed = tap("post_attention_layernorm", self.post_attention_layernorm(h))
        return tap("output", h + self.mlp(normed, qwen35.model.within(tap, "mlp")))

    mp.setattr(qwen35.model.Block, "__call__", call)


def gate_in_dtype(z, normed, like):
    return (z * mx.sigmoid(z) * normed).astype(like.dtype)


def gained(name, value, entry):
    if not name.endswith(f"{L}norm.weight"):
        return value
    return (value.astype(mx.float32) * 1.004).astype(value.dtype)


FAULTS = {
    "q scaled once instead of twice": Fault(
        patched(qwen35.delta_net, "normalize_qk", q_scaled_once), f"layers.0.{L}q"
    ),
    "q/k eps of the other version": Fault(
        patched(qwen35.delta_net, "normalize_qk", eps_of_the_other_version),
        f"layers.0.{L}q",
        case=("small-qk", "float32", "one-shot"),
    ),
    "eps of the stream's norms hard-wired": Fault(
        eps_is_1e_6(qwen35.model), "layers.0.input_layernorm", K3
    ),
    "eps of the q and k norms hard-wired": Fault(
        eps_is_1e_6(qwen35.attention), f"layers.1.{A}q_norm", K3
    ),
    "eps of the gated norm hard-wired": Fault(
        patched(
            qwen35.delta_net,
            "GatedRMSNorm",
            lambda real: lambda size, eps: real(size, 1e-6),
        ),
        f"layers.0.{L}norm",
        K3,
    ),
    "residual taken after the norm": Fault(residual_after_norm, "layers.0.residual"),
    # One rounding more: the error goes from 1.07e-2 to 1.08e-2, transformers' own being 8.0e-3.
    "gated norm without its f32": Fault(
        lambda mp: mp.setattr(qwen35.norm, "_silu_gate", gate_in_dtype),
        f"layers.0.{L}norm",
        BF16,
        transformers_too=False,
    ),
    # A bfloat16 gain moves by an ulp or not at all: from 1.07e-2 to 1.21e-2, in the place above.
    "gated norm's gain 0.4 % large": Fault(
        loaded(gained), f"layers.0.{L}norm", BF16, transformers_too=False
    ),
}
