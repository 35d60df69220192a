"""The Gated DeltaNet layer: projections, short convolution, delta rule, gated norm."""

import mlx.core as mx
import mlx.nn as nn
from jaxtyping import Float

from qwen35.cache import DeltaCache
from qwen35.config import TextConfig
from qwen35.delta import decay, gated_delta_update
from qwen35.norm import GatedRMSNorm, normalize_qk
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
        self, x: Float[mx.array, "B S H"], cache: DeltaCache, tap: Tap = untapped
    ) -> Float[mx.array, "B S H"]:
        """Advance `cache` by S tokens and return the layer's increment.

        Order of cache writes: conv tail, recurrent state, then the count of tokens.
        """
        rows, tokens, _ = x.shape
        qkv = tap("qkv", self.in_proj_qkv(x))
        z = tap("z", self.in_proj_z(x).reshape(rows, tokens, self.value_heads, self.value_size))
        b = tap("b", self.in_proj_b(x))
        a = tap("a", self.in_proj_a(x))

        tail = cache.conv_tail
        if tail is None:
            tail = mx.zeros((rows, self.kept, qkv.shape[-1]), x.dtype)
        window = mx.concatenate([tail, qkv], axis=1)
        cache.conv_tail = tap("conv_tail", self._owned_tail(window))
        q, k, v = self._heads(tap("conv_out", self.conv1d(window)))
        q, k = normalize_qk(q, k, self.qk_eps)
        q, k, v = tap("q", q), tap("k", k), tap("v", v)

        beta = tap("beta", mx.sigmoid(b))
        g = tap("g", decay(self.A_log, a, self.dt_bias))
        state = cache.recurrent_state
        if state is None:
            state = mx.zeros((rows, self.value_heads, self.value_size, self.key_size), mx.float32)
        y, state = gated_delta_update(q, k, v, g, beta, state)
        y = tap("y", y)
        cache.recurrent_state = tap("recurrent_state", state)
        cache.advance(tokens)

        normed = tap("norm", self.norm(y, z))
        return tap("out", self.out_proj(normed.reshape(rows, tokens, -1)))

    def _owned_tail(self, window: mx.array) -> mx.array:
        """Copy the last K−1 rows: a view would keep the whole prefill's buffer alive."""
        return mx.contiguous(window[:, window.shape[1] - self.kept :])

    def _heads(self, mixed: mx.array) -> tuple[mx.array, mx.array, mx.array]:
        rows, tokens, _ = mixed.shape
        keys = self.key_heads * self.key_size
        q, k, v = mx.split(mixed, [keys, 2 * keys], axis=-1)
        return (
            q.reshape(rows, tokens, self.key_heads, self.key_size),
            k.reshape(rows, tokens, self.key_heads, self.key_size),
            v.reshape(rows, tokens, self.value_heads, self.value_size),
        )
