"""The Gated DeltaNet layer: projections, short convolution, delta rule, gated norm."""

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from jaxtyping import Float, Int

from qwen35.config import TextConfig
from qwen35.counts import Counts, of_rows
from qwen35.delta import decay, gated_delta_update, state_only_update
from qwen35.forward import PLAIN, Forward, token_mask
from qwen35.layer_cache import DeltaCache
from qwen35.norm import GatedRMSNorm, normalize_qk
from qwen35.record import Record
from qwen35.semantics import Semantics
from qwen35.tap import Tap, untapped


class CausalConv1d(nn.Module):
    """Depthwise causal convolution over time with SiLU; the caller supplies the K−1 rows before."""

    def __init__(self, channels: int, kernel: int) -> None:
        super().__init__()
        self.weight = mx.zeros((channels, kernel, 1))

    def __call__(self, x: Float[mx.array, "B nS C"]) -> Float[mx.array, "B S C"]:
        """Convolve K−1+S rows into S."""
        return nn.silu(mx.conv1d(x, self.weight, groups=self.weight.shape[0]))


class GatedDeltaNet(nn.Module):
    """Linear attention with a gated delta rule; shapes in the letters of `parity.taps`."""

    def __init__(self, config: TextConfig, semantics: Semantics) -> None:
        super().__init__()
        self.key_heads, self.key_size = config.linear_num_key_heads, config.linear_key_head_dim
        self.value_heads, self.value_size = (
            config.linear_num_value_heads,
            config.linear_value_head_dim,
        )
        self.kept = config.linear_conv_kernel_dim - 1
        self.qk_eps = semantics.qk_eps
        hidden = config.hidden_size
        self.in_proj_qkv = nn.Linear(hidden, config.conv_dim, bias=False)
        self.in_proj_z = nn.Linear(hidden, config.value_dim, bias=False)
        self.in_proj_b = nn.Linear(hidden, self.value_heads, bias=False)
        self.in_proj_a = nn.Linear(hidden, self.value_heads, bias=False)
        self.conv1d = CausalConv1d(config.conv_dim, config.linear_conv_kernel_dim)
        self.A_log = mx.zeros(self.value_heads)
        self.dt_bias = mx.zeros(self.value_heads)
        self.norm = GatedRMSNorm(self.value_size, config.rms_norm_eps)
        self.out_proj = nn.Linear(config.value_dim, hidden, bias=False)

    def __call__(
        self,
        x: Float[mx.array, "B S H"],
        cache: DeltaCache,
        tap: Tap = untapped,
        forward: Forward = PLAIN,
    ) -> Float[mx.array, "B S H"]:
        """Advance `cache` by each row's tokens and return the layer's increment.

        Order of cache writes: conv tail, recurrent state, then the count of tokens. Outputs at
        padding are undefined.
        """
        rows, tokens, _ = x.shape
        project = forward.project
        qkv = tap("qkv", project(self.in_proj_qkv, x))
        z = project(self.in_proj_z, x).reshape(rows, tokens, self.value_heads, self.value_size)
        z = tap("z", z)
        b = tap("b", project(self.in_proj_b, x))
        a = tap("a", project(self.in_proj_a, x))

        if forward.real is not None:
            qkv = mx.where(forward.real[..., None], qkv, 0)
        if cache.armed:
            held = (cache.conv_tail, cache.recurrent_state, cache.offset)
            cache.record = Record(*held, qkv, a, b)
        window = self._window(cache.conv_tail, qkv)
        cache.conv_tail = tap("conv_tail", self._tail(window, forward.ends))
        q, k, v = self._heads(tap("conv_out", self.conv1d(window)))
        q, k = normalize_qk(q, k, self.qk_eps)
        q, k, v = tap("q", q), tap("k", k), tap("v", v)

        beta = tap("beta", mx.sigmoid(b))
        g = tap("g", decay(self.A_log, a, self.dt_bias))
        state = self._state(cache.recurrent_state, rows)
        y, state = gated_delta_update(q, k, v, g, beta, state, forward.real)
        y = tap("y", y)
        cache.recurrent_state = tap("recurrent_state", state)
        cache.advance(tokens if forward.lengths is None else forward.lengths)

        normed = tap("norm", self.norm(y, z))
        return tap("out", project(self.out_proj, normed.reshape(rows, tokens, -1)))

    def replay(self, record: Record, keep: Counts) -> tuple[mx.array | None, mx.array | None]:
        """Return conv tail and state after the first `keep` tokens of the recorded forward.

        Computed from the recorded inputs as the forward did, without what states do not need.
        keep = 0 gives the very arrays that were held before it.
        """
        if (tokens := int(np.max(keep))) == 0:
            return record.conv_tail, record.recurrent_state
        qkv, a, b = (x[:, :tokens] for x in (record.qkv, record.a, record.b))
        rows, ends = qkv.shape[0], None
        if not isinstance(keep, int):
            ends = mx.array(of_rows(keep, rows).astype(np.int32))
            qkv = mx.where(token_mask(ends, tokens)[..., None], qkv, 0)
        window = self._window(record.conv_tail, qkv)
        q, k, v = self._heads(self.conv1d(window))
        _, k = normalize_qk(q, k, self.qk_eps)
        g, state = decay(self.A_log, a, self.dt_bias), self._state(record.recurrent_state, rows)
        state = state_only_update(k, v, g, mx.sigmoid(b), state, ends)
        return self._tail(window, ends), state

    def _window(
        self, tail: mx.array | None, qkv: Float[mx.array, "B S C"]
    ) -> Float[mx.array, "B nS C"]:
        if tail is None:
            tail = mx.zeros((qkv.shape[0], self.kept, qkv.shape[-1]), qkv.dtype)
        return mx.concatenate([tail, qkv], axis=1)

    def _state(self, state: mx.array | None, rows: int) -> Float[mx.array, "B Hv Dv Dk"]:
        if state is None:
            state = mx.zeros((rows, self.value_heads, self.value_size, self.key_size), mx.float32)
        return state

    def _tail(self, window: mx.array, ends: Int[mx.array, "B"] | None) -> mx.array:
        return self._owned_tail(window) if ends is None else self._ragged_tail(window, ends)

    def _owned_tail(self, window: mx.array) -> mx.array:
        """Copy the last K−1 rows: a view would keep the whole prefill's buffer alive."""
        return mx.contiguous(window[:, window.shape[1] - self.kept :])

    def _ragged_tail(
        self, window: Float[mx.array, "B nS C"], ends: Int[mx.array, "B"]
    ) -> Float[mx.array, "B n C"]:
        """Copy the K−1 rows before each row's end: rows ℓ … ℓ+K−2, the old tail where ℓ = 0."""
        rows = (ends[:, None] + mx.arange(self.kept))[..., None]
        return mx.take_along_axis(window, rows, axis=1)

    def _heads(self, mixed: mx.array) -> tuple[mx.array, mx.array, mx.array]:
        rows, tokens, _ = mixed.shape
        keys = self.key_heads * self.key_size
        q, k, v = mx.split(mixed, [keys, 2 * keys], axis=-1)
        return (
            q.reshape(rows, tokens, self.key_heads, self.key_size),
            k.reshape(rows, tokens, self.key_heads, self.key_size),
            v.reshape(rows, tokens, self.value_heads, self.value_size),
        )
