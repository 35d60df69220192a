"""Faults of meaning, patched into the implementation: each must be caught at its place."""

from dataclasses import dataclass

import mlx.core as mx
import pytest

import qwen35.attention
import qwen35.delta
import qwen35.delta_net
import qwen35.layer_cache
import qwen35.load
import qwen35.model
import qwen35.norm
from qwen35.semantics import PRESETS

L, A = "linear_attn.", "self_attn."
FULL = "layers.3."
CHUNKS = ("tiny", "float32", "chunk-3")


@dataclass(frozen=True)
class Fault:
    """`patch(monkeypatch)` makes it; `tap` is the first to differ from mlx-lm, at `step`."""

    patch: object
    tap: str
    case: tuple[str, str, str] = ("tiny", "float32", "one-shot")
    step: int = 0
    verdict: str = "exceeds"
    transformers_too: bool = True


def patched(owner, name, change):
    """Return a patch that replaces owner.name by change(original)."""
    return lambda mp: mp.setattr(owner, name, change(getattr(owner, name)))


def plan_entries(change):
    """Return a change to the plan's application: `change(name, value, entry)` for each tensor."""

    def wrap(apply):
        def applied(plan, checkpoint, dtype=None):
            entries = {entry.target: entry for entry in plan.entries}
            return [(n, change(n, v, entries[n])) for n, v in apply(plan, checkpoint, dtype)]

        return applied

    return patched(qwen35.load, "apply", wrap)


def scrambled_axis(name, value, entry):
    if not name.endswith("conv1d.weight"):
        return value
    channels, kernel, _ = value.shape
    return value.reshape(kernel, channels, 1).transpose(1, 0, 2)


def tail_rows(choose):
    return patched(qwen35.delta_net.GatedDeltaNet, "_owned_tail", lambda real: choose)


def tiled_heads(update):
    def tiled(q, k, v, g, beta, state, *mask):
        repeats = v.shape[2] // k.shape[2]
        q, k = (mx.tile(x, (1, 1, repeats, 1)) for x in (q, k))
        return update(q, k, v, g, beta, state, *mask)

    return tiled


def state_in_bf16(update):
    def rounded(*args):
        y, state = update(*args)
        return y, state.astype(mx.bfloat16)

    return rounded


def scaled_once(normalize):
    def wrong(q, k, eps_on):
        q, k = normalize(q, k, eps_on)
        return q * k.shape[-1] ** 0.5, k

    return wrong


def eps_of_the_other_version(normalize):
    return lambda q, k, eps_on: normalize(q, k, PRESETS["mlx-lm-0.31"].qk_eps)


def halves_swapped(split):
    def swapped(x, where, axis):
        first, second = split(x, where, axis=axis)
        return second, first

    return swapped


class _Mx:
    """mlx.core, or its fast module, with some functions replaced, for one module."""

    def __init__(self, **replacements):
        self.__dict__.update(replacements)

    def __getattr__(self, name):
        return getattr(mx, name)


def swap_query_and_gate(mp):
    mp.setattr(qwen35.attention, "mx", _Mx(split=halves_swapped(mx.split)))


def residual_after_norm(mp):
    def call(self, x, cache, tap=qwen35.model.untapped, *forward):
        normed = tap("input_layernorm", self.input_layernorm(x))
        mixer = self.linear_attn if self.is_linear else self.self_attn
        prefix = "linear_attn" if self.is_linear else "self_attn"
        h = tap(
            "residual", normed + mixer(normed, cache, qwen35.model.within(tap, prefix), *forward)
        )
        normed = tap("post_attention_layernorm", self.post_attention_layernorm(h))
        return tap("output", h + self.mlp(normed, qwen35.model.within(tap, "mlp")))

    mp.setattr(qwen35.model.Block, "__call__", call)


def gate_in_dtype(z, normed, like):
    return (z * mx.sigmoid(z) * normed).astype(like.dtype)


def offset_stays(mp):
    real = qwen35.layer_cache.KVCache.append

    def append(self, keys, values):
        result = real(self, keys, values)
        self.offset = 0
        return result

    mp.setattr(qwen35.layer_cache.KVCache, "append", append)


def forgets(slot):
    """Return a patch that loses one slot of a linear layer's cache after every forward."""
    return lambda mp: mp.setattr(
        qwen35.layer_cache.DeltaCache, "advance", lambda self, tokens: setattr(self, slot, None)
    )


def attend(**changes):
    """Return a patch that calls the attention with other arguments."""

    def patch(mp):
        attention = lambda *args, **options: mx.fast.scaled_dot_product_attention(
            *args, **(options | changes)
        )
        mp.setattr(qwen35.attention, "mx", _Mx(fast=_Mx(scaled_dot_product_attention=attention)))

    return patch


def states_of_other_rows(update):
    def leaking(*args):
        y, state = update(*args)
        return y, state[::-1]

    return leaking


def norms_swapped(apply):
    def swapped(*args):
        weights = dict(apply(*args))
        names = [f"language_model.model.{FULL}{A}{x}_norm.weight" for x in "qk"]
        values = [weights[name] for name in names]
        return list((weights | dict(zip(names, values[::-1], strict=True))).items())

    return swapped


def one_position_late(rope):
    return lambda x, dim, theta, offset: rope(x, dim, theta, offset + (offset > 0))


def rope_with(**changes):
    def wrap(rope):
        def wrong(x, rotary_dim, theta, offset):
            dim = changes.get("dim", lambda d: d)(rotary_dim)
            traditional = changes.get("traditional", False)
            return mx.fast.rope(
                x, dim, traditional=traditional, base=theta, scale=1.0, offset=offset
            )

        return wrong

    return patched(qwen35.attention, "rope", wrap)


FAULTS = {
    "shift applied twice": Fault(
        plan_entries(lambda n, v, e: v + 1 if e.add_one else v), "layers.0.input_layernorm"
    ),
    "shift missed": Fault(
        plan_entries(lambda n, v, e: v - 1 if e.add_one else v), "layers.0.input_layernorm"
    ),
    "conv weight axis wrong": Fault(plan_entries(scrambled_axis), f"layers.0.{L}conv_out"),
    "tail off by one": Fault(
        tail_rows(lambda self, w: mx.contiguous(w[:, w.shape[1] - self.kept - 1 : -1])),
        f"layers.0.{L}conv_tail",
    ),
    "tail order reversed": Fault(
        tail_rows(lambda self, w: mx.contiguous(w[:, : w.shape[1] - self.kept - 1 : -1])),
        f"layers.0.{L}conv_tail",
    ),
    "decay left out": Fault(
        patched(
            qwen35.delta_net,
            "decay",
            lambda real: lambda A_log, a, dt_bias: mx.ones(a.shape, mx.float32),
        ),
        f"layers.0.{L}g",
    ),
    "state in bf16": Fault(
        patched(qwen35.delta_net, "gated_delta_update", state_in_bf16),
        f"layers.0.{L}recurrent_state",
        verdict="dtype",
    ),
    "q scaled once instead of twice": Fault(
        patched(qwen35.delta_net, "normalize_qk", scaled_once), f"layers.0.{L}q"
    ),
    "q/k eps of the other version": Fault(
        patched(qwen35.delta_net, "normalize_qk", eps_of_the_other_version),
        f"layers.0.{L}q",
        case=("small-qk", "float32", "one-shot"),
    ),
    "gate and query halves swapped": Fault(swap_query_and_gate, f"{FULL}{A}q_proj"),
    "rope on the wrong fraction": Fault(rope_with(dim=lambda d: 2 * d), f"{FULL}{A}q_rope"),
    "rope interleaved": Fault(rope_with(traditional=True), f"{FULL}{A}q_rope"),
    "residual taken after the norm": Fault(residual_after_norm, "layers.0.residual"),
    "gated norm without its f32": Fault(
        lambda mp: mp.setattr(qwen35.norm, "_silu_gate", gate_in_dtype),
        f"layers.0.{L}norm",
        case=("tiny", "bfloat16", "one-shot"),
        transformers_too=False,
    ),
    "heads repeated by tiling": Fault(
        patched(qwen35.delta_net, "gated_delta_update", tiled_heads), f"layers.0.{L}y"
    ),
    "state not kept": Fault(forgets("recurrent_state"), f"layers.0.{L}y", CHUNKS, step=1),
    "tail not kept": Fault(forgets("conv_tail"), f"layers.0.{L}conv_out", CHUNKS, step=1),
    "states of other rows": Fault(
        patched(qwen35.delta_net, "gated_delta_update", states_of_other_rows),
        f"layers.0.{L}recurrent_state",
    ),
    "dt_bias left out": Fault(
        patched(
            qwen35.delta_net,
            "decay",
            lambda real: lambda A_log, a, dt_bias: real(A_log, a, 0 * dt_bias),
        ),
        f"layers.0.{L}g",
    ),
    "query and key norms swapped": Fault(
        patched(qwen35.load, "apply", norms_swapped), f"{FULL}{A}q_norm"
    ),
    "scores not scaled": Fault(attend(scale=1.0), f"{FULL}{A}attention"),
    "attention not causal": Fault(attend(mask=None), f"{FULL}{A}attention"),
    "rope one position late": Fault(
        patched(qwen35.attention, "rope", one_position_late), f"{FULL}{A}q_rope", CHUNKS, step=1
    ),
    "cache offset not advanced": Fault(offset_stays, f"{FULL}{A}offset"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_mlx_lm_catches_the_fault_and_names_its_place(name, monkeypatch, checkpoints):
    fault = FAULTS[name]
    fault.patch(monkeypatch)
    result = checkpoints.judge(*fault.case)
    first = result["first_divergence"]
    assert result["verdict"] == "differs"
    assert (first["step"], first["tap"], first["verdict"]) == (fault.step, fault.tap, fault.verdict)
    assert first["attribution"] == "makes"


@pytest.mark.parametrize("name", [n for n, fault in FAULTS.items() if fault.transformers_too])
def test_transformers_catches_the_fault_and_names_its_place(name, monkeypatch, checkpoints):
    fault = FAULTS[name]
    fault.patch(monkeypatch)
    result = checkpoints.judge(*fault.case, oracles=("transformers",))
    first = result["first_divergence"]
    assert result["verdict"] == "differs"
    assert (first["step"], first["tap"], first["verdict"]) == (fault.step, fault.tap, fault.verdict)


@pytest.mark.parametrize("case", sorted({fault.case for fault in FAULTS.values()}))
def test_without_the_fault_the_same_case_holds(case, checkpoints):
    result = checkpoints.judge(*case, oracles=("mlx-lm", "transformers"))
    assert result["verdict"] == "holds", result["first_divergence"]
    assert all(pair["compared"] for pair in result["pairs"].values())
