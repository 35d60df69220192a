"""The conv tail owns its memory: what a prefill leaves behind does not grow with the prefill."""

import gc

import mlx.core as mx
import pytest

from qwen35.config import parse_config
from qwen35.delta_net import GatedDeltaNet
from qwen35.layer_cache import DeltaCache
from qwen35.semantics import Semantics

CONFIG = {
    "model_type": "qwen3_5",
    "text_config": {
        "model_type": "qwen3_5_text",
        "hidden_size": 24,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "full_attention_interval": 4,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 6,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 160,
        "linear_conv_kernel_dim": 4,
        "vocab_size": 7,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5},
    },
}


@pytest.fixture(autouse=True)
def exact_memory():
    """Let no buffer of another size be reused, and no constant be made while measuring."""
    limit = mx.set_cache_limit(0)
    bytes_left_by_prefill(1)
    yield
    mx.set_cache_limit(limit)


def bytes_left_by_prefill(tokens: int) -> int:
    """Return the active bytes that stay after a prefill whose cache alone is kept."""
    mx.random.seed(0)
    layer = GatedDeltaNet(parse_config(CONFIG, "test"), Semantics())
    mx.eval(layer.parameters())
    cache = DeltaCache()
    gc.collect()
    before = mx.get_active_memory()
    x = mx.random.normal((1, tokens, 24))
    mx.eval(layer(x, cache), cache.arrays())
    del x
    gc.collect()
    return mx.get_active_memory() - before


def test_active_memory_after_2048_tokens_is_that_after_16():
    assert bytes_left_by_prefill(2048) == bytes_left_by_prefill(16)


def test_it_is_the_size_of_the_cache():
    C, Hv, Dv, Dk = 2 * 2 * 32 + 6 * 160, 6, 160, 32
    page = 1 << 14  # what an allocator may round each of the two arrays up to
    assert 0 <= bytes_left_by_prefill(2048) - 4 * (3 * C + Hv * Dv * Dk) < 2 * page


@pytest.mark.parametrize(
    "view",
    [
        lambda self, window: window[:, window.shape[1] - self.kept :],
        lambda self, window: window[:, window.shape[1] - self.kept :].astype(window.dtype),
    ],
)
def test_a_tail_that_is_a_view_is_seen(monkeypatch, view):
    monkeypatch.setattr(GatedDeltaNet, "_owned_tail", view)
    whole_window = 4 * 2048 * (2 * 2 * 32 + 6 * 160)
    assert bytes_left_by_prefill(2048) - bytes_left_by_prefill(16) > 0.9 * whole_window
