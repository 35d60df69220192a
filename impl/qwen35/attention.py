"""Full attention with an output gate, grouped heads and partial RoPE."""

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from jaxtyping import Bool, Float

from qwen35.config import TextConfig
from qwen35.counts import of_rows
from qwen35.forward import PLAIN, Forward
from qwen35.layer_cache import KVCache
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
        self,
        x: Float[mx.array, "B S H"],
        cache: KVCache,
        tap: Tap = untapped,
        forward: Forward = PLAIN,
    ) -> Float[mx.array, "B S H"]:
        """Append each row's tokens to `cache` and return the layer's increment.

        Right padding is seen by no token that counts; the cache keeps it as left padding.
        """
        rows, tokens, _ = x.shape
        project = forward.project
        # q_proj holds, for each head, D queries and then D gates.
        queries, gate = mx.split(
            project(self.q_proj, x).reshape(rows, tokens, self.heads, 2 * self.size), 2, axis=-1
        )
        queries = tap("q_proj", queries)
        gate = tap("gate", gate.reshape(rows, tokens, -1))
        heads = (rows, tokens, self.kv_heads, self.size)
        keys = tap("k_proj", project(self.k_proj, x).reshape(heads))
        values = tap("v", project(self.v_proj, x).reshape(heads))

        queries = tap("q_norm", self.q_norm(queries)).transpose(0, 2, 1, 3)
        keys = tap("k_norm", self.k_norm(keys)).transpose(0, 2, 1, 3)
        positions: int | mx.array | None = forward.positions
        if positions is None:
            assert isinstance(cache.offset, int)
            positions = cache.offset
        queries = tap("q_rope", rope(queries, self.rotary_dim, self.theta, positions))
        keys = tap("k_rope", rope(keys, self.rotary_dim, self.theta, positions))
        values = values.transpose(0, 2, 1, 3)
        if forward.real is not None:
            keys, values = (mx.where(forward.real[:, None, :, None], x, 0) for x in (keys, values))
        keys, values = cache.append(keys, values)
        if forward.right_padding is not None:
            cache.drop_right_padding(forward.right_padding)
        if tap is not untapped:
            tap("offset", mx.array(of_rows(cache.offset, rows).astype(np.int32)))
        keys, values = tap("keys", keys), tap("values", values)

        if forward.independent_rows:
            attended = self._attend_one_by_one(queries, keys, values, forward.attention_mask)
        else:
            attended = self._attend(queries, keys, values, forward.attention_mask)
        attended = tap("attention", attended).transpose(0, 2, 1, 3).reshape(rows, tokens, -1)
        return tap("out", project(self.o_proj, tap("gated", attended * mx.sigmoid(gate))))

    def _attend(
        self,
        queries: Float[mx.array, "B Hq S D"],
        keys: Float[mx.array, "B Hkv T D"],
        values: Float[mx.array, "B Hkv T D"],
        mask: Bool[mx.array, "B 1 S T"] | None,
    ) -> Float[mx.array, "B Hq S D"]:
        causal = "causal" if queries.shape[2] > 1 else None
        return mx.fast.scaled_dot_product_attention(
            queries,
            keys,
            values,
            scale=self.size**-0.5,
            mask=causal if mask is None else mask,
        )

    def _attend_one_by_one(
        self, queries: mx.array, keys: mx.array, values: mx.array, mask: mx.array | None
    ) -> Float[mx.array, "B Hq S D"]:
        """Attend with each query as when its key was the last."""
        tokens, columns = queries.shape[2], keys.shape[2]
        outputs = []
        for t in range(tokens):
            end = columns - tokens + t + 1
            seen = None if mask is None else mask[:, :, t : t + 1, :end]
            query = queries[:, :, t : t + 1]
            outputs.append(self._attend(query, keys[:, :, :end], values[:, :, :end], seen))
        return mx.concatenate(outputs, axis=2)
