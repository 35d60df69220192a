"""The truth: Qwen3.5's text model in plain NumPy float64, in one file, to be read and ported from.

It reads the checkpoint itself and shares nothing with the implementation it judges. Symbols and
layouts are those of parity.taps: B rows, S new tokens, T tokens in the cache, H hidden, K taps of
the convolution on C channels, Hk/Hv linear heads of Dk/Dv, Hq/Hkv attention heads of D.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors import safe_open

from parity.taps import FULL, LINEAR
from parity.trace import Feed, Trace

Config = dict[str, Any]
Cache = dict[str, np.ndarray]
"""One layer's state between forwards. Arrays are replaced, never written to."""

_DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
# The gains that transformers stores as γ − 1. linear_attn.norm is γ in both generations.
_ZERO_CENTRED = ("input_layernorm", "post_attention_layernorm", "q_norm", "k_norm")


class ReferenceRunner:
    """Runs a checkpoint of either generation in float64, from weights rounded to `dtype`.

    The rounding is the runners' cast on loading (to nearest, ties to even); A_log stays as stored.
    Nothing after it rounds below float64. Raises ValueError for a checkpoint it cannot read.
    """

    name = "reference"

    def __init__(self, path: str | Path, dtype: str) -> None:
        self.dtype = dtype
        self.config = read_config(Path(path))
        self.layer_types: tuple[str, ...] = self.config["layer_types"]
        self.weights = read_weights(Path(path), dtype)

    # A program is a parity.program.Program, unnamed here because that module imports qwen35.
    @np.errstate(invalid="ignore")  # NaN in, NaN out: the judge says so
    def run(self, program: Any, feed: Feed | None = None, trace: Trace | None = None) -> Trace:
        """See parity.runners.base.Runner. A `trace` that is given says what each tap passes on."""
        config, layers = self.config, len(self.layer_types)
        info = {"numpy": np.__version__, "dtype": "float64", "weights": self.dtype}
        trace = trace or Trace(self.name, self.layer_types, info)
        program.check_vocabulary(config["vocab_size"])
        caches: list[Cache] = [{} for _ in self.layer_types]
        for forward, (_, _, ids) in enumerate(program.forwards()):
            if (rows := program.chosen_rows()[forward]) is not None:
                caches = [{name: held[rows] for name, held in cache.items()} for cache in caches]
            model = Part("", self.weights, {}, trace, forward)
            x = model.put("embed_tokens", model["embed_tokens.weight"][ids])
            for i, kind in enumerate(self.layer_types):
                x = x if feed is None else feed(forward, i).astype(np.float64)
                part = Part(f"layers.{i}.", self.weights, caches[i], trace, forward)
                x = block(part, config, linear_attention if kind == LINEAR else full_attention, x)
            x = x if feed is None else feed(forward, layers).astype(np.float64)
            x = model.put("norm", rms_norm(x, model["norm.weight"], config["rms_norm_eps"]))
            head = "embed_tokens" if config["tie_word_embeddings"] else "lm_head"
            model.put("logits", model.linear(head, x))
        return trace


@dataclass
class Part:
    """A layer during one forward: its weights, its cache, and where its taps are recorded."""

    prefix: str
    weights: dict[str, np.ndarray]
    cache: Cache
    trace: Trace
    forward: int

    def __getitem__(self, name: str) -> np.ndarray:
        if (full := self.prefix + name) not in self.weights:
            raise ValueError(f"the checkpoint has no {full}. Give one that is complete.")
        return self.weights[full]

    def linear(self, name: str, x: np.ndarray) -> np.ndarray:
        """x Wᵀ + b, with W [outputs, inputs] and b where the checkpoint has one."""
        y = x @ self[name + ".weight"].T
        bias = self.prefix + name + ".bias"
        return y + self.weights[bias] if bias in self.weights else y

    def put(self, tap: str, value: np.ndarray) -> np.ndarray:
        """Record the value of a tap and return what goes on from there."""
        return self.trace.add(self.forward, self.prefix + tap, np.ascontiguousarray(value))


def block(part: Part, config: Config, mixer: Callable, x: np.ndarray) -> np.ndarray:
    """One layer on the residual stream [B, S, H]: x + mixer(norm(x)), then x + SwiGLU(norm(x))."""
    put, eps = part.put, config["rms_norm_eps"]
    normed = put("input_layernorm", rms_norm(x, part["input_layernorm.weight"], eps))
    x = put("residual", x + mixer(part, config, normed))
    gain = part["post_attention_layernorm.weight"]
    normed = put("post_attention_layernorm", rms_norm(x, gain, eps))
    gate = put("mlp.gate", part.linear("mlp.gate_proj", normed))
    up = put("mlp.up", part.linear("mlp.up_proj", normed))
    act = put("mlp.act", silu(gate) * up)
    return put("output", x + put("mlp.out", part.linear("mlp.down_proj", act)))


def linear_attention(part: Part, config: Config, x: np.ndarray) -> np.ndarray:
    """Gated DeltaNet (Yang, Kautz, Hatamizadeh 2024): normed input [B, S, H] -> [B, S, H]."""
    put, linear, cache = part.put, part.linear, part.cache
    B, S, _ = x.shape
    Hk, Dk = config["linear_num_key_heads"], config["linear_key_head_dim"]
    Hv, Dv = config["linear_num_value_heads"], config["linear_value_head_dim"]
    conv_weight = part["linear_attn.conv1d.weight"]
    C, K = conv_weight.shape

    qkv = put("linear_attn.qkv", linear("linear_attn.in_proj_qkv", x))
    z = put("linear_attn.z", linear("linear_attn.in_proj_z", x).reshape(B, S, Hv, Dv))
    b = put("linear_attn.b", linear("linear_attn.in_proj_b", x))
    a = put("linear_attn.a", linear("linear_attn.in_proj_a", x))

    # The convolution sees the K-1 inputs before the new ones: zeros at the start.
    window = np.concatenate([cache.get("conv_tail", np.zeros((B, K - 1, C))), qkv], axis=1)
    cache["conv_tail"] = put("linear_attn.conv_tail", window[:, S:])
    conv = put("linear_attn.conv_out", silu(causal_conv(window, conv_weight)))
    q, k, v = np.split(conv, [Hk * Dk, 2 * Hk * Dk], axis=2)
    q = put("linear_attn.q", l2_norm(q.reshape(B, S, Hk, Dk)) * Dk**-0.5)
    k = put("linear_attn.k", l2_norm(k.reshape(B, S, Hk, Dk)))
    v = put("linear_attn.v", v.reshape(B, S, Hv, Dv))
    beta = put("linear_attn.beta", sigmoid(b))
    softplus = np.logaddexp(0.0, a + part["linear_attn.dt_bias"])
    g = put("linear_attn.g", np.exp(-np.exp(part["linear_attn.A_log"]) * softplus))

    q, k = repeat_heads(q, Hv // Hk, axis=2), repeat_heads(k, Hv // Hk, axis=2)
    state = cache.get("recurrent_state", np.zeros((B, Hv, Dv, Dk)))
    y, state = gated_delta_rule(q, k, v, g, beta, state)
    y = put("linear_attn.y", y)
    cache["recurrent_state"] = put("linear_attn.recurrent_state", state)
    normed = rms_norm(y, part["linear_attn.norm.weight"], config["rms_norm_eps"])
    normed = put("linear_attn.norm", normed * silu(z))
    return put("linear_attn.out", linear("linear_attn.out_proj", normed.reshape(B, S, -1)))


def full_attention(part: Part, config: Config, x: np.ndarray) -> np.ndarray:
    """Gated grouped-query causal attention: normed input [B, S, H] -> [B, S, H]."""
    put, linear, cache = part.put, part.linear, part.cache
    B, S, _ = x.shape
    Hq, Hkv, D = (config[n] for n in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    eps, turning = config["rms_norm_eps"], (config["rope_theta"], config["rotary_dim"])

    # Each head's 2·D outputs are its query, then its gate.
    both = linear("self_attn.q_proj", x).reshape(B, S, Hq, 2 * D)
    q = put("self_attn.q_proj", both[..., :D])
    gate = put("self_attn.gate", both[..., D:].reshape(B, S, Hq * D))
    k = put("self_attn.k_proj", linear("self_attn.k_proj", x).reshape(B, S, Hkv, D))
    v = put("self_attn.v", linear("self_attn.v_proj", x).reshape(B, S, Hkv, D))
    q = put("self_attn.q_norm", rms_norm(q, part["self_attn.q_norm.weight"], eps))
    k = put("self_attn.k_norm", rms_norm(k, part["self_attn.k_norm.weight"], eps))

    none = np.zeros((B, Hkv, 0, D))
    old_keys, old_values = cache.get("keys", none), cache.get("values", none)
    T = old_keys.shape[2] + S
    positions = np.arange(T - S, T)
    q = put("self_attn.q_rope", rope(q.swapaxes(1, 2), positions, *turning))
    k = put("self_attn.k_rope", rope(k.swapaxes(1, 2), positions, *turning))
    put("self_attn.offset", np.full(B, T, np.int32))
    cache["keys"] = put("self_attn.keys", np.concatenate([old_keys, k], 2))
    cache["values"] = put("self_attn.values", np.concatenate([old_values, v.swapaxes(1, 2)], 2))

    keys, values = (repeat_heads(cache[n], Hq // Hkv, axis=1) for n in ("keys", "values"))
    scores = q @ keys.swapaxes(2, 3) * D**-0.5  # [B, Hq, S, T]
    is_seen = np.arange(T) <= positions[:, None]
    out = put("self_attn.attention", softmax(np.where(is_seen, scores, -np.inf)) @ values)
    out = put("self_attn.gated", out.swapaxes(1, 2).reshape(B, S, Hq * D) * sigmoid(gate))
    return put("self_attn.out", linear("self_attn.o_proj", out))


def gated_delta_rule(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, g: np.ndarray, beta: np.ndarray, state: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The recurrence, one token after the other (Yang, Kautz, Hatamizadeh 2024, equation 10).

    q and k [B, S, Hv, Dk] (heads already repeated), v [B, S, Hv, Dv], g and beta [B, S, Hv],
    state [B, Hv, Dv, Dk] -> y [B, S, Hv, Dv] and the new state.
    """
    y = np.empty_like(v)
    for t in range(v.shape[1]):
        state = state * g[:, t, :, None, None]
        recalled = (state @ k[:, t, :, :, None])[..., 0]
        delta = (v[:, t] - recalled) * beta[:, t, :, None]
        state = state + delta[..., :, None] * k[:, t, :, None, :]
        y[:, t] = (state @ q[:, t, :, :, None])[..., 0]
    return y, state


def causal_conv(window: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """One filter a channel, the last tap on the newest: [B, K-1+S, C], [C, K] -> [B, S, C]."""
    C, K = weight.shape
    S = window.shape[1] - (K - 1)
    return sum((window[:, j : j + S] * weight[:, j] for j in range(K)), np.zeros(C))


def rope(x: np.ndarray, positions: np.ndarray, theta: float, rotary_dim: int) -> np.ndarray:
    """Rotate the first `rotary_dim` of D in x [B, heads, S, D] (Su et al. 2021); positions [S].

    Dimension i turns with i + rotary_dim/2 by the angle position · theta^(−2i/rotary_dim).
    """
    half = rotary_dim // 2
    angles = positions[:, None] * theta ** (-2.0 * np.arange(half) / rotary_dim)
    cos, sin = np.cos(angles), np.sin(angles)
    x1, x2, rest = np.split(x, [half, rotary_dim], axis=-1)
    return np.concatenate([x1 * cos - x2 * sin, x2 * cos + x1 * sin, rest], axis=-1)


def repeat_heads(x: np.ndarray, times: int, axis: int) -> np.ndarray:
    """Let each key head serve `times` neighbouring heads: 0 0 1 1, not 0 1 0 1."""
    return np.repeat(x, times, axis)


def rms_norm(x: np.ndarray, gain: np.ndarray, eps: float) -> np.ndarray:
    """x / sqrt(mean(x²) + eps) · gain, over the last axis (Zhang and Sennrich 2019)."""
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * gain


def l2_norm(x: np.ndarray) -> np.ndarray:
    """x / sqrt(sum(x²) + 1e-6), over the last axis: eps is added to the *sum*, not the mean."""
    return x / np.sqrt(np.sum(x * x, axis=-1, keepdims=True) + 1e-6)


def sigmoid(x: np.ndarray) -> np.ndarray:
    """1 / (1 + e^−x); where e^−x overflows, 0 is right."""
    with np.errstate(over="ignore"):
        return 1.0 / (1.0 + np.exp(-x))


def silu(x: np.ndarray) -> np.ndarray:
    """x · sigmoid(x)."""
    return x * sigmoid(x)


def softmax(x: np.ndarray) -> np.ndarray:
    """e^x / sum(e^x) over the last axis, the maximum taken out first."""
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def read_config(path: Path) -> Config:
    """Return the text model's config, nested or flat, with layer_types, rotary_dim, rope_theta."""
    outer = json.loads((path / "config.json").read_text(encoding="utf-8"))
    config: Config = {"full_attention_interval": 4, "partial_rotary_factor": 0.25}  # every oracle's
    config["tie_word_embeddings"] = outer.get("tie_word_embeddings", False)
    config |= outer.get("text_config", outer)
    if not (kinds := config.get("layer_types")):
        every = config["full_attention_interval"]
        kinds = [LINEAR if (i + 1) % every else FULL for i in range(config["num_hidden_layers"])]
    rotary = dict(config)
    for part in (config.get(name) or {} for name in ("rope_scaling", "rope_parameters")):
        if turns := {part[n] for n in ("rope_type", "type") if n in part} - {"default"}:
            raise ValueError(f"{path}: rope_type is {turns}, only 'default' is known here")
        rotary |= part
    rotary_dim = int(config["head_dim"] * rotary["partial_rotary_factor"])
    theta = float(rotary["rope_theta"])
    return config | {"layer_types": tuple(kinds), "rotary_dim": rotary_dim, "rope_theta": theta}


@np.errstate(over="ignore")  # beyond the dtype's range is infinity, as on loading
def read_weights(path: Path, dtype: str) -> dict[str, np.ndarray]:
    """Return float64 weights by the trunk's own names, conv1d as [C, K], every gain as γ."""
    weights: dict[str, np.ndarray] = {}
    is_transformers = False
    for file in sorted(path.glob("model*.safetensors")):
        with safe_open(file, framework="numpy") as tensors:
            for stored in tensors.keys():  # noqa: SIM118 (no mapping: it has only keys())
                if (name := trunk_name(stored)) is None:
                    continue
                value = tensors.get_tensor(stored)
                if value.dtype not in _DTYPES.values() or name in weights:
                    why = "comes twice" if name in weights else f"is {value.dtype}"
                    raise ValueError(f"{file}: {stored} {why}. Give a model without quantization")
                if name.endswith(".conv1d.weight"):  # [C, 1, K] by transformers, else [C, K, 1]
                    is_transformers |= value.shape[2] != 1
                    value = value.reshape(len(value), -1)
                rounded = value if name.endswith(".A_log") else value.astype(_DTYPES[dtype])
                weights[name] = rounded.astype(np.float64)
    for name in weights if is_transformers else ():
        if name == "norm.weight" or name.removesuffix(".weight").endswith(_ZERO_CENTRED):
            weights[name] += 1.0
    return weights


def trunk_name(stored: str) -> str | None:
    """Return a tensor's name without its generation's prefix; None if no part of the text model."""
    if "mtp." in stored or stored.startswith(("vision_tower", "model.visual")):
        return None
    for prefix in ("language_model.model.", "model.language_model.", "language_model.", "model."):
        if stored.startswith(prefix):
            return stored.removeprefix(prefix)
    return stored
