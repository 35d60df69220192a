"""Full attention with an output gate, grouped heads and partial RoPE."""

import mlx.core as mx
import mlx.nn as nn
from jaxtyping import Float

from qwen35.cache import KVCache
from qwen35.config import TextConfig
from qwen35.rope import rope
from qwen35.tap import Tap, untapped


class GatedAttention(nn.Module):
    """softmax(q·kᵀ/√D)·v times sigmoid(gate), then the output projection."""

    def __init__(self, config: TextConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.size = config.head_dim
        self.rotary_dim, self.theta = config.rotary_dim, config.rope_theta
        hidden, bias = config.hidden_size, config.attention_bias
        self.q_proj = nn.Linear(hidden, 2 * self.heads * self.size, bias=bias)
        self.k_proj = nn.Linear(hidden, self.kv_heads * self.size, bias=bias)
        self.v_proj = nn.Linear(hidden, self.kv_heads * self.size, bias=bias)
        self.o_proj = nn.Linear(self.heads * self.size, hidden, bias=bias)
        self.q_norm = nn.RMSNorm(self.size, eps=config.rms_norm_eps)
        self.k_norm = nn.RMSNorm(self.size, eps=config.rms_norm_eps)

    def __call__(
        self, x: Float[mx.array, "B S H"], cache: KVCache, tap: Tap = untapped
    ) -> Float[mx.array, "B S H"]:
        """Append S tokens to `cache` and return the layer's increment."""
        rows, tokens, _ = x.shape
        # q_proj holds, for each head, D queries and then D gates.
        queries, gate = mx.split(
            self.q_proj(x).reshape(rows, tokens, self.heads, 2 * self.size), 2, axis=-1
        )
        queries = tap("q_proj", queries)
        gate = tap("gate", gate.reshape(rows, tokens, -1))
        keys = tap("k_proj", self.k_proj(x).reshape(rows, tokens, self.kv_heads, self.size))
        values = tap("v", self.v_proj(x).reshape(rows, tokens, self.kv_heads, self.size))

        queries = tap("q_norm", self.q_norm(queries)).transpose(0, 2, 1, 3)
        keys = tap("k_norm", self.k_norm(keys)).transpose(0, 2, 1, 3)
        queries = tap("q_rope", rope(queries, self.rotary_dim, self.theta, cache.offset))
        keys = tap("k_rope", rope(keys, self.rotary_dim, self.theta, cache.offset))
        keys, values = cache.append(keys, values.transpose(0, 2, 1, 3))
        if tap is not untapped:
            tap("offset", mx.full((rows,), cache.offset, mx.int32))
        keys, values = tap("keys", keys), tap("values", values)

        attended = mx.fast.scaled_dot_product_attention(
            queries,
            keys,
            values,
            scale=self.size**-0.5,
            mask="causal" if tokens > 1 else None,
        )
        attended = tap("attention", attended).transpose(0, 2, 1, 3).reshape(rows, tokens, -1)
        return tap("out", self.o_proj(tap("gated", attended * mx.sigmoid(gate))))
