"""A random model with no two sizes alike, and what its caches hold, as bytes."""

from functools import cache as remember

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten

from parity.runners.mlx_arrays import to_numpy
from qwen35.cache import Cache
from qwen35.config import parse_config
from qwen35.layer_cache import DeltaCache
from qwen35.model import Model

DTYPES = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}
NAN_ID = 52
"""A token whose embedding is NaN: only fit for padding."""

CONFIG = {
    "model_type": "qwen3_5",
    "text_config": {
        "model_type": "qwen3_5_text",
        "hidden_size": 40,
        "intermediate_size": 26,
        "num_hidden_layers": 4,
        "full_attention_interval": 2,
        "num_attention_heads": 10,
        "num_key_value_heads": 5,
        "head_dim": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 6,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 12,
        "linear_conv_kernel_dim": 4,
        "vocab_size": 53,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5},
    },
}


@remember
def tiny_model(dtype: str = "float32", qk_scale: float = 1.0, **sizes: int) -> Model:
    """Return the model, seeded: linear layers 0 and 2, attention layers 1 and 3.

    `qk_scale` multiplies the projections of q and k of linear layers, `sizes` replace CONFIG's.
    """
    config = parse_config(CONFIG | {"text_config": CONFIG["text_config"] | sizes}, "tests")
    model = Model(config)
    rng = np.random.default_rng(7)
    weights = []
    for name, value in sorted(tree_flatten(model.parameters())):
        drawn = rng.normal(size=value.shape) * value.shape[-1] ** -0.5
        if "norm" in name:
            drawn = 1 + 0.1 * drawn
        if name.endswith("embed_tokens.weight"):
            drawn = 5 * drawn
            drawn[NAN_ID] = np.nan
        if name.endswith("in_proj_qkv.weight"):
            drawn[: config.conv_dim - config.value_dim] *= qk_scale
        if name.endswith("conv1d.weight"):
            drawn = rng.normal(size=value.shape) * 0.5
        kept = mx.float32 if name.endswith("A_log") else DTYPES[dtype]
        weights.append((name, mx.array(drawn.astype(np.float32)).astype(kept)))
    model.update(tree_unflatten(weights))
    mx.eval(model.parameters())
    return model


def drawn_ids(rows: int, tokens: int, seed: int = 0) -> np.ndarray:
    """Return int32 [B, S], without NAN_ID."""
    return np.random.default_rng(seed).integers(0, NAN_ID, (rows, tokens)).astype(np.int32)


def bits(x: mx.array | None) -> tuple:
    """Return what tells two arrays apart: shape, dtype and bytes."""
    return () if x is None else (x.shape, str(x.dtype), to_numpy(x).tobytes())


def held(cache: Cache) -> dict[str, tuple]:
    """Return every layer's state by name, columns in use with their padding."""
    state: dict[str, tuple] = {}
    for i, entry in enumerate(cache):
        state[f"{i}.offset"] = (str(entry.offset),)
        if isinstance(entry, DeltaCache):
            state[f"{i}.conv_tail"] = bits(entry.conv_tail)
            state[f"{i}.recurrent_state"] = bits(entry.recurrent_state)
        else:
            state[f"{i}.keys"], state[f"{i}.values"] = bits(entry.keys), bits(entry.values)
    return state


def held_by_row(cache: Cache, row: int) -> dict[str, tuple]:
    """Return one row's states by name, its keys and values without padding."""
    state: dict[str, tuple] = {}
    for i, entry in enumerate(cache):
        state[f"{i}.offset"] = (int(np.broadcast_to(entry.offset, cache.rows)[row]),)
        if isinstance(entry, DeltaCache):
            state[f"{i}.conv_tail"] = bits(entry.conv_tail[row])
            state[f"{i}.recurrent_state"] = bits(entry.recurrent_state[row])
        else:
            state[f"{i}.keys"], state[f"{i}.values"] = map(bits, entry.row(row))
    return state


def assert_same(left: dict[str, tuple], right: dict[str, tuple]) -> None:
    """Compare by name, so that a failure names the state."""
    assert left.keys() == right.keys()
    assert [name for name in left if left[name] != right[name]] == []


def run(model: Model, ids: np.ndarray, cache: Cache, **options) -> mx.array:
    """Advance `cache` and return the logits."""
    return model(mx.array(ids), cache, **options)
