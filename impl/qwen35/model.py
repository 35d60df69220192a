"""The text model: embedding, blocks, final norm and head."""

import mlx.core as mx
import mlx.nn as nn
from jaxtyping import Float, Int

from qwen35.attention import GatedAttention
from qwen35.cache import Cache, DeltaCache, KVCache, LayerCache
from qwen35.config import TextConfig
from qwen35.delta_net import GatedDeltaNet
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
        self, x: Float[mx.array, "B S H"], cache: LayerCache, tap: Tap = untapped
    ) -> Float[mx.array, "B S H"]:
        """Advance the layer's cache by S tokens and return the residual stream after it."""
        normed = tap("input_layernorm", self.input_layernorm(x))
        if isinstance(cache, DeltaCache):
            h = x + self.linear_attn(normed, cache, within(tap, "linear_attn"))
        else:
            h = x + self.self_attn(normed, cache, within(tap, "self_attn"))
        h = tap("residual", h)
        normed = tap("post_attention_layernorm", self.post_attention_layernorm(h))
        return tap("output", h + self.mlp(normed, within(tap, "mlp")))


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
        return [
            DeltaCache() if block.is_linear else KVCache()
            for block in self.language_model.model.layers
        ]

    def __call__(
        self,
        ids: Int[mx.array, "B S"],
        cache: Cache,
        tap: Tap = untapped,
        eval_layers: bool = False,
    ) -> Float[mx.array, "B S V"]:
        """Advance `cache` by S tokens and return the logits of each.

        `eval_layers` evaluates every layer's output and cache before the next: no lazy tail then
        pins a layer's buffers, which bounds the memory of a long prefill. Ids are not checked
        against the vocabulary; MLX reads out of bounds silently.
        """
        trunk = self.language_model.model
        x = tap("embed_tokens", trunk.embed_tokens(ids))
        for i, (block, entry) in enumerate(zip(trunk.layers, cache, strict=True)):
            x = block(x, entry, within(tap, f"layers.{i}"))
            if eval_layers:
                mx.eval(x, entry.arrays())
        x = tap("norm", trunk.norm(x))
        if self.config.tie_word_embeddings:
            return tap("logits", trunk.embed_tokens.as_linear(x))
        return tap("logits", self.language_model.lm_head(x))


def prefill(
    model: Model, ids: Int[mx.array, "B S"], cache: Cache, chunk: int = PREFILL_CHUNK
) -> Float[mx.array, "B 1 V"]:
    """Run a prompt in chunks of `chunk` tokens, layer by layer; return the last token's logits."""
    if ids.shape[1] == 0:
        raise ValueError("an empty prompt: give at least one token a row")
    for start in range(0, ids.shape[1], chunk):
        logits = model(ids[:, start : start + chunk], cache, eval_layers=True)[:, -1:]
        mx.eval(logits)
    return logits
