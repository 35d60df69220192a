"""The truth: Qwen3.5's text model in plain NumPy float64, in one file, to be read and ported from.

It reads the checkpoint itself and shares nothing with the implementation it judges. Section
numbers are those of the model's description in docs ("The model, exactly"); symbols and layouts
are those of parity.taps: B rows, S new tokens, T tokens in the cache, H hidden, C convolution
channels, K taps of the convolution, Hk/Hv linear heads of Dk/Dv, Hq/Hkv attention heads of D.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn, Protocol

import ml_dtypes
import numpy as np
from safetensors import safe_open

from parity.taps import FULL, LINEAR
from parity.trace import Feed, Trace

_DTYPES = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}
_QK_EPS = 1e-6
# The gains a transformers checkpoint stores as γ − 1; linear_attn.norm is γ in both generations.
_ZERO_CENTRED = ("input_layernorm", "post_attention_layernorm", "q_norm", "k_norm")

Weights = Callable[[str], np.ndarray]
"""A tensor's name within its layer -> its values."""
Put = Callable[[str, np.ndarray], np.ndarray]
"""(name of a tap within its layer, its value) -> that value, recorded."""
Cache = dict[str, np.ndarray]
"""One layer's state between forwards. Arrays are replaced, never written to."""


class Forwards(Protocol):
    """What the reference asks of a program (parity.program.Program, which imports qwen35)."""

    def forwards(self) -> list[tuple[int, str, np.ndarray]]:
        """Return (step, op, ids [B, S]) for each forward."""

    def check_vocabulary(self, size: int) -> None:
        """Raise for an id outside [0, size)."""


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
        if self.config["tie_word_embeddings"]:
            self.weights["lm_head.weight"] = self.weights["embed_tokens.weight"]

    def run(
        self, program: Forwards, feed: Feed | None = None, on_forward: Callable[[], None] = int
    ) -> Trace:
        """See Runner. `on_forward` is called after each forward, for progress."""
        info = {"numpy": np.__version__, "dtype": "float64", "weights": self.dtype}
        trace = Trace(self.name, self.layer_types, info)
        program.check_vocabulary(len(self._of("")("embed_tokens.weight")))
        caches: list[Cache] = [{} for _ in self.layer_types]
        for forward, (_, _, ids) in enumerate(program.forwards()):
            self._forward(trace, forward, ids, caches, feed)
            on_forward()
        return trace

    def _forward(
        self, trace: Trace, forward: int, ids: np.ndarray, caches: list[Cache], feed: Feed | None
    ) -> None:
        eps = self.config["rms_norm_eps"]

        def putter(prefix: str) -> Put:
            def put(name: str, value: np.ndarray) -> np.ndarray:
                value = np.ascontiguousarray(value)
                trace.add(forward, prefix + name, value)
                return value

            return put

        def entering(layer: int, stream: np.ndarray) -> np.ndarray:
            return stream if feed is None else feed(forward, layer).astype(np.float64)

        w, put = self._of(""), putter("")
        x = put("embed_tokens", w("embed_tokens.weight")[ids])
        for layer, kind in enumerate(self.layer_types):
            mixer = linear_attention if kind == LINEAR else full_attention
            x = entering(layer, x)
            prefix = f"layers.{layer}."
            x = block(mixer, self.config, self._of(prefix), x, caches[layer], putter(prefix))
        x = entering(len(self.layer_types), x)
        x = put("norm", rms_norm(x, w("norm.weight"), eps))
        put("logits", x @ w("lm_head.weight").T)

    def _of(self, prefix: str) -> Weights:
        def weight(name: str) -> np.ndarray:
            if prefix + name not in self.weights:
                raise ValueError(
                    f"the checkpoint has no tensor {prefix + name} (under any of the known "
                    "prefixes). See what it has: parity inspect MODEL."
                )
            return self.weights[prefix + name]

        return weight


def block(mixer: Callable, config: dict, w: Weights, x: np.ndarray, cache: Cache, put: Put):
    """Return the residual stream [B, S, H] after one layer: mixer, then SwiGLU (section 6)."""
    eps = config["rms_norm_eps"]
    normed = put("input_layernorm", rms_norm(x, w("input_layernorm.weight"), eps))
    x = put("residual", x + mixer(config, w, normed, cache, put))
    gain = w("post_attention_layernorm.weight")
    normed = put("post_attention_layernorm", rms_norm(x, gain, eps))
    gate = put("mlp.gate", normed @ w("mlp.gate_proj.weight").T)
    up = put("mlp.up", normed @ w("mlp.up_proj.weight").T)
    act = put("mlp.act", silu(gate) * up)
    return put("output", x + put("mlp.out", act @ w("mlp.down_proj.weight").T))


def linear_attention(config: dict, w: Weights, x: np.ndarray, cache: Cache, put: Put) -> np.ndarray:
    """Gated DeltaNet (section 2): normed input [B, S, H] -> [B, S, H]."""
    B, S, _ = x.shape
    Hk, Dk = config["linear_num_key_heads"], config["linear_key_head_dim"]
    Hv, Dv = config["linear_num_value_heads"], config["linear_value_head_dim"]
    K = config["linear_conv_kernel_dim"]

    qkv = put("linear_attn.qkv", x @ w("linear_attn.in_proj_qkv.weight").T)
    z = put("linear_attn.z", (x @ w("linear_attn.in_proj_z.weight").T).reshape(B, S, Hv, Dv))
    b = put("linear_attn.b", x @ w("linear_attn.in_proj_b.weight").T)
    a = put("linear_attn.a", x @ w("linear_attn.in_proj_a.weight").T)

    # The convolution sees the K-1 inputs before the new ones: zeros at the start.
    window = np.concatenate([cache.get("conv_tail", np.zeros((B, K - 1, qkv.shape[2]))), qkv], 1)
    cache["conv_tail"] = put("linear_attn.conv_tail", window[:, S:])
    conv = put("linear_attn.conv_out", silu(causal_conv(window, w("linear_attn.conv1d.weight"))))
    q, k, v = np.split(conv, [Hk * Dk, 2 * Hk * Dk], axis=2)
    q = put("linear_attn.q", l2_norm(q.reshape(B, S, Hk, Dk)) * Dk**-0.5)
    k = put("linear_attn.k", l2_norm(k.reshape(B, S, Hk, Dk)))
    v = put("linear_attn.v", v.reshape(B, S, Hv, Dv))
    beta = put("linear_attn.beta", sigmoid(b))
    rate = np.exp(w("linear_attn.A_log"))
    g = put("linear_attn.g", np.exp(-rate * softplus(a + w("linear_attn.dt_bias"))))

    state = cache.get("recurrent_state", np.zeros((B, Hv, Dv, Dk)))
    q, k = repeat_heads(q, Hv // Hk, axis=2), repeat_heads(k, Hv // Hk, axis=2)
    y, state = gated_delta_rule(q, k, v, g, beta, state)
    y = put("linear_attn.y", y)
    cache["recurrent_state"] = put("linear_attn.recurrent_state", state)
    normed = rms_norm(y, w("linear_attn.norm.weight"), config["rms_norm_eps"])
    normed = put("linear_attn.norm", normed * silu(z))
    return put("linear_attn.out", normed.reshape(B, S, -1) @ w("linear_attn.out_proj.weight").T)


def full_attention(config: dict, w: Weights, x: np.ndarray, cache: Cache, put: Put) -> np.ndarray:
    """Gated grouped-query attention (section 5): normed input [B, S, H] -> [B, S, H]."""
    B, S, _ = x.shape
    Hq, Hkv, D = (config[n] for n in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    eps, rotary_dim = config["rms_norm_eps"], config["rotary_dim"]

    # Each head's 2·D outputs are its query, then its gate.
    both = (x @ w("self_attn.q_proj.weight").T).reshape(B, S, Hq, 2 * D)
    q = put("self_attn.q_proj", both[..., :D])
    gate = put("self_attn.gate", both[..., D:].reshape(B, S, Hq * D))
    k = put("self_attn.k_proj", (x @ w("self_attn.k_proj.weight").T).reshape(B, S, Hkv, D))
    v = put("self_attn.v", (x @ w("self_attn.v_proj.weight").T).reshape(B, S, Hkv, D))
    q = put("self_attn.q_norm", rms_norm(q, w("self_attn.q_norm.weight"), eps)).swapaxes(1, 2)
    k = put("self_attn.k_norm", rms_norm(k, w("self_attn.k_norm.weight"), eps)).swapaxes(1, 2)

    old_keys = cache.get("keys", np.zeros((B, Hkv, 0, D)))
    old_values = cache.get("values", np.zeros((B, Hkv, 0, D)))
    seen = old_keys.shape[2]
    positions = np.arange(seen, seen + S)
    q = put("self_attn.q_rope", rope(q, positions, config["rope_theta"], rotary_dim))
    k = put("self_attn.k_rope", rope(k, positions, config["rope_theta"], rotary_dim))
    put("self_attn.offset", np.full(B, seen + S, np.int32))
    cache["keys"] = put("self_attn.keys", np.concatenate([old_keys, k], 2))
    cache["values"] = put("self_attn.values", np.concatenate([old_values, v.swapaxes(1, 2)], 2))

    keys = repeat_heads(cache["keys"], Hq // Hkv, axis=1)
    values = repeat_heads(cache["values"], Hq // Hkv, axis=1)
    scores = q @ keys.swapaxes(2, 3) * D**-0.5  # [B, Hq, S, T]
    is_past = np.arange(seen + S) <= positions[:, None]
    out = put("self_attn.attention", softmax(np.where(is_past, scores, -np.inf)) @ values)
    out = out.swapaxes(1, 2).reshape(B, S, Hq * D)
    out = put("self_attn.gated", out * sigmoid(gate))
    return put("self_attn.out", out @ w("self_attn.o_proj.weight").T)


def gated_delta_rule(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, g: np.ndarray, beta: np.ndarray, state: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Section 2, step 7, one token after the other.

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
    """Section 2, step 3: one filter a channel over [B, K-1+S, C], weight [C, K] -> [B, S, C]."""
    K = weight.shape[1]
    S = window.shape[1] - (K - 1)
    return sum(window[:, j : j + S] * weight[:, j] for j in range(K))


def rope(x: np.ndarray, positions: np.ndarray, theta: float, rotary_dim: int) -> np.ndarray:
    """Section 5: rotate the first `rotary_dim` of D in x [B, heads, S, D], positions [S].

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
    """x / sqrt(sum(x²) + 1e-6), over the last axis (section 2, step 5): eps is in the *sum*."""
    return x / np.sqrt(np.sum(x * x, axis=-1, keepdims=True) + _QK_EPS)


def sigmoid(x: np.ndarray) -> np.ndarray:
    """1 / (1 + e^−x); an overflow of e^−x gives the right 0."""
    with np.errstate(over="ignore"):
        return 1.0 / (1.0 + np.exp(-x))


def silu(x: np.ndarray) -> np.ndarray:
    """x · sigmoid(x)."""
    return x * sigmoid(x)


def softplus(x: np.ndarray) -> np.ndarray:
    """log(1 + e^x), without overflow."""
    return np.logaddexp(0.0, x)


def softmax(x: np.ndarray) -> np.ndarray:
    """Over the last axis; the maximum is taken out first."""
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def read_config(path: Path) -> dict[str, Any]:
    """Return the text model's config, nested or flat, with layer_types, rotary_dim, rope_theta."""
    outer = json.loads((path / "config.json").read_text(encoding="utf-8"))
    config = {"tie_word_embeddings": outer.get("tie_word_embeddings", False)}
    config |= outer.get("text_config", outer)
    if not config.get("layer_types"):
        every = config["full_attention_interval"]
        kinds = [LINEAR if (i + 1) % every else FULL for i in range(config["num_hidden_layers"])]
        config["layer_types"] = kinds
    config["layer_types"] = tuple(config["layer_types"])
    rotary = config | (config.get("rope_parameters") or {})
    if (kind := rotary.get("rope_type", rotary.get("type", "default"))) != "default":
        _refuse(path / "config.json", f"rope_type is {kind!r}", "Only 'default' is known here")
    config["rope_theta"] = float(rotary["rope_theta"])
    config["rotary_dim"] = int(config["head_dim"] * rotary["partial_rotary_factor"])
    return config


def read_weights(path: Path, dtype: str) -> dict[str, np.ndarray]:
    """Return float64 weights under the trunk's own names, from either generation (section 1)."""
    weights: dict[str, np.ndarray] = {}
    is_transformers = False
    for file in sorted(path.glob("model*.safetensors")):
        with safe_open(file, framework="numpy") as tensors:
            for stored in tensors.keys():  # noqa: SIM118 (no mapping: it has only keys())
                name = trunk_name(stored)
                if name is None:
                    continue
                value = tensors.get_tensor(stored)
                if value.dtype not in _DTYPES.values():
                    _refuse(file, f"{stored} is {value.dtype}", "Give a model without quantization")
                if not name.endswith(".A_log"):
                    value = value.astype(_DTYPES[dtype])
                if name.endswith("conv1d.weight"):  # [C, 1, K] by transformers, else [C, K, 1]
                    is_transformers |= value.shape[2] != 1
                    value = value.reshape(len(value), -1)
                if name in weights:
                    _refuse(file, f"{stored} comes twice as {name}", "Remove one")
                weights[name] = value.astype(np.float64)
    if is_transformers:
        for name in weights:
            if name == "norm.weight" or name.split(".")[-2] in _ZERO_CENTRED:
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


def _refuse(file: Path, problem: str, remedy: str) -> NoReturn:
    raise ValueError(f"{file}: {problem}. {remedy}.")
