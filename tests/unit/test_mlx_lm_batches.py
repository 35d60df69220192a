"""Ragged batches and cache operations against mlx-lm's batch caches, bit for bit."""

import mlx.core as mx
import pytest
from mlx_lm.models.cache import ArraysCache, BatchKVCache, KVCache
from tiny_models import DTYPES, bits, drawn_ids

from parity.runners.mlx_lm import MlxLmRunner
from qwen35.cache import Cache
from qwen35.headers import open_checkpoint
from qwen35.layer_cache import DeltaCache
from qwen35.load import load


@pytest.fixture(params=DTYPES)
def pair(request, checkpoints):
    """Our model and mlx-lm's, of one checkpoint."""
    checkpoint = open_checkpoint(checkpoints.path("tiny", request.param))
    return load(checkpoint, request.param), MlxLmRunner(checkpoint, request.param).model


def batch_cache(model, rows, left_padding=None):
    """Return mlx-lm's empty batch cache."""
    padding = left_padding or [0] * rows
    return [
        BatchKVCache(padding) if isinstance(entry, KVCache) else ArraysCache(2, left_padding)
        for entry in model.make_cache()
    ]


def ragged(model, ids, cache, lengths):
    """Run one right-padded forward the way mlx-lm's batch generator does."""
    padding = [ids.shape[1] - n for n in lengths]
    for entry in cache:
        entry.prepare(lengths=lengths, right_padding=padding)
    logits = model(mx.array(ids), cache=cache)
    for entry in cache:
        entry.finalize()
    return logits


def assert_same_state(ours, theirs):
    """Compare every layer's states, of keys and values each row's own tokens."""
    for i, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
        if isinstance(mine, DeltaCache):
            assert bits(mine.conv_tail) == bits(other[0]), i
            assert bits(mine.recurrent_state) == bits(other[1]), i
            continue
        assert mine.width == other._idx, i
        for row, offset in enumerate(other.offset.tolist()):
            keys, values = mine.row(row)
            assert keys.shape[1] == offset, i
            assert bits(keys) == bits(other.keys[row, :, other._idx - offset : other._idx]), i
            assert bits(values) == bits(other.values[row, :, other._idx - offset : other._idx]), i


def claim_ragged_batches_agree(pair):
    ours, theirs = pair
    lengths, ids = [6, 1, 4, 3], drawn_ids(4, 6)
    mine, other = ours.make_cache(), batch_cache(theirs, 4)
    a = ours(mx.array(ids), mine, lengths=lengths)
    b = ragged(theirs, ids, other, lengths)
    for row, tokens in enumerate(lengths):
        assert bits(a[row, :tokens]) == bits(b[row, :tokens])
    assert_same_state(mine, other)
    return mine, other


def go_on(pair, mine, other, rows, seed=5):
    """Run three tokens, then one, in both."""
    for width in (3, 1):
        ids = mx.array(drawn_ids(rows, width, seed))
        assert bits(pair[0](ids, mine)) == bits(pair[1](ids, cache=other))
        assert_same_state(mine, other)


def test_a_right_padded_prompt_and_decodes(pair):
    mine, other = claim_ragged_batches_agree(pair)
    go_on(pair, mine, other, 4)


def test_a_left_padded_prompt_and_decodes(pair):
    lengths, ids = [6, 1, 4], drawn_ids(3, 6)
    padding = [6 - n for n in lengths]
    mine, other = pair[0].make_cache(), batch_cache(pair[1], 3, padding)
    a = pair[0](mx.array(ids), mine, lengths=lengths, padding="left")
    b = pair[1](mx.array(ids), cache=other)
    for row, start in enumerate(padding):
        assert bits(a[row, start:]) == bits(b[row, start:])
    assert_same_state(mine, other)
    for entry in other:
        if isinstance(entry, ArraysCache):
            entry.finalize()
    go_on(pair, mine, other, 3)


def test_filter(pair):
    mine, other = claim_ragged_batches_agree(pair)
    mine.filter([3, 2])
    for entry in other:
        entry.filter(mx.array([3, 2]))
    assert_same_state(mine, other)
    go_on(pair, mine, other, 2)


def test_extend(pair):
    mine, other = claim_ragged_batches_agree(pair)
    more, theirs = pair[0].make_cache(), batch_cache(pair[1], 2)
    ids = drawn_ids(2, 9, seed=3)
    pair[0](mx.array(ids), more, lengths=[9, 2])
    ragged(pair[1], ids, theirs, [9, 2])
    mine.extend(more)
    for entry, joined in zip(other, theirs, strict=True):
        entry.extend(joined)
    assert_same_state(mine, other)
    go_on(pair, mine, other, 6)


def test_extract_and_merge(pair):
    mine, other = claim_ragged_batches_agree(pair)
    order = [2, 0, 1]
    ours = [mine.extract(row) for row in order]
    theirs = [[entry.extract(row) for entry in other] for row in order]
    merged = Cache.merge(ours)
    batch = [
        (ArraysCache if isinstance(parts[0], ArraysCache) else BatchKVCache).merge(list(parts))
        for parts in zip(*theirs, strict=True)
    ]
    assert_same_state(merged, batch)
    go_on(pair, merged, batch, 3)


def test_a_wrong_tail_is_caught(pair, monkeypatch):
    layer = type(pair[0].language_model.model.layers[0].linear_attn)
    monkeypatch.setattr(layer, "_ragged_tail", lambda self, window, ends: self._owned_tail(window))
    with pytest.raises(AssertionError):
        claim_ragged_batches_agree(pair)
