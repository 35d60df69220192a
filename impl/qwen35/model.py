"""The text model: embedding, blocks, final norm and head."""

from collections.abc import Sequence
from typing import Literal

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from jaxtyping import Float, Int

from qwen35.attention import GatedAttention
from qwen35.cache import Cache
from qwen35.config import TextConfig
from qwen35.counts import Counts, checked, of_rows
from qwen35.delta_net import GatedDeltaNet
from qwen35.errors import CacheError
from qwen35.forward import PLAIN, Forward, make_forward
from qwen35.layer_cache import DeltaCache, KVCache, LayerCache
from qwen35.mlp import MLP
from qwen35.semantics import Semantics
from qwen35.tap import Tap, untapped, within

PREFILL_CHUNK = 2048
"""Tokens a forward in `prefill` unless told otherwise."""


class Block(nn.Module):
    """x + mixer(norm(x)), then h + mlp(norm(h))."""

    def __init__(self, config: TextConfig, layer: int, semantics: Semantics) -> None:
        super().__init__()
        self.is_linear = config.layer_types[layer] == "linear_attention"
        if self.is_linear:
            self.linear_attn = GatedDeltaNet(config, semantics)
        else:
            self.self_attn = GatedAttention(config)
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = MLP(config.hidden_size, config.intermediate_size)

    def __call__(
        self,
        x: Float[mx.array, "B S H"],
        cache: LayerCache,
        tap: Tap = untapped,
        forward: Forward = PLAIN,
    ) -> Float[mx.array, "B S H"]:
        """Advance the layer's cache by each row's tokens; return the residual stream after it."""
        normed = tap("input_layernorm", self.input_layernorm(x))
        if isinstance(cache, DeltaCache):
            h = x + self.linear_attn(normed, cache, within(tap, "linear_attn"), forward)
        else:
            h = x + self.self_attn(normed, cache, within(tap, "self_attn"), forward)
        h = tap("residual", h)
        normed = tap("post_attention_layernorm", self.post_attention_layernorm(h))
        return tap("output", h + self.mlp(normed, within(tap, "mlp"), forward))


class Trunk(nn.Module):
    """Embedding, blocks and final norm; module names are the checkpoint's."""

    def __init__(self, config: TextConfig, semantics: Semantics) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = [Block(config, i, semantics) for i in range(config.num_hidden_layers)]
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)


class LanguageModel(nn.Module):
    """The trunk and, unless it is tied to the embedding, the head."""

    def __init__(self, config: TextConfig, semantics: Semantics) -> None:
        super().__init__()
        self.model = Trunk(config, semantics)
        if not config.tie_word_embeddings:
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)


class Model(nn.Module):
    """A Qwen3.5 dense text model; parameters carry the canonical names of `qwen35.plan`."""

    def __init__(self, config: TextConfig, semantics: Semantics = Semantics()) -> None:  # noqa: B008 - frozen
        super().__init__()
        self.config = config
        self.semantics = semantics
        self.language_model = LanguageModel(config, semantics)

    def make_cache(self) -> Cache:
        """Return an empty cache."""
        return Cache(
            [
                DeltaCache() if block.is_linear else KVCache()
                for block in self.language_model.model.layers
            ]
        )

    def __call__(
        self,
        ids: Int[mx.array, "B S"],
        cache: Cache,
        tap: Tap = untapped,
        eval_layers: bool = False,
        lengths: Sequence[int] | np.ndarray | None = None,
        padding: Literal["left", "right"] = "right",
        independent_rows: bool = False,
    ) -> Float[mx.array, "B S V"]:
        """Advance `cache` by S tokens a row and return the logits of each.

        Row r has `lengths[r]` tokens, 0 to S, and then padding, whose ids do not matter and whose
        outputs are undefined; before them, in a first forward, with `padding` "left".
        `independent_rows` computes up to 4 tokens a row as if they came one by one and each row
        alone. Raises CacheError; on any error `cache` is as before, for which the buffers that are
        replaced are held until the forward returns.

        `eval_layers` evaluates every layer's output and cache before the next: no lazy tail then
        pins a layer's buffers, which bounds the memory of a long prefill. Ids are not checked
        against the vocabulary; MLX reads out of bounds silently.
        """
        rows, tokens = ids.shape
        if tokens == 0:
            raise CacheError("a forward of no tokens: give at least one column of ids.")
        counts: Counts = tokens if lengths is None else checked("lengths", lengths, rows, tokens)
        layers = cache.begin(rows)
        if padding == "left" and cache.round is not None:
            raise CacheError("left padding in a round: what is kept begins at the first column.")
        forward = make_forward(layers, rows, tokens, counts, padding, independent_rows)
        trunk = self.language_model.model
        x = tap("embed_tokens", trunk.embed_tokens(ids))
        for i, (block, entry) in enumerate(zip(trunk.layers, layers, strict=True)):
            x = block(x, entry, within(tap, f"layers.{i}"), forward)
            if eval_layers:
                mx.eval(x, entry.arrays())
        x = tap("norm", trunk.norm(x))
        tied = self.config.tie_word_embeddings
        head = trunk.embed_tokens.as_linear if tied else self.language_model.lm_head
        logits = tap("logits", forward.project(head, x))
        cache.finish(layers, rows, counts)
        return logits


def prefill(
    model: Model,
    ids: Int[mx.array, "B S"],
    cache: Cache,
    chunk: int = PREFILL_CHUNK,
    lengths: Sequence[int] | np.ndarray | None = None,
) -> Float[mx.array, "B 1 V"]:
    """Run a prompt in chunks of `chunk` tokens, layer by layer; return the last token's logits.

    With `lengths` (see Model) these are the logits of each row's last token, undefined for a row of
    length 0. An error in a chunk leaves the cache as it was before that chunk.
    """
    rows, tokens = ids.shape
    if tokens == 0:
        raise ValueError("an empty prompt: give at least one token a row")
    counts = of_rows(tokens if lengths is None else checked("lengths", lengths, rows, tokens), rows)
    last = None
    for start in range(0, tokens, chunk):
        part = ids[:, start : start + chunk]
        real = np.clip(counts - start, 0, part.shape[1])
        logits = model(part, cache, eval_layers=True, lengths=real)
        if np.all(real == part.shape[1]):
            last = logits[:, -1:]
        else:
            at = mx.array(np.maximum(real - 1, 0))[:, None, None]
            ended = mx.take_along_axis(logits, at, axis=1)
            reached = mx.array(real > 0)[:, None, None]
            last = ended if last is None else mx.where(reached, ended, last)
        mx.eval(last)
    assert last is not None
    return last
