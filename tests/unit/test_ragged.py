"""Ragged batches: a row is that row alone, whatever pads it."""

import mlx.core as mx
import numpy as np
import pytest
from tiny_models import (
    DTYPES,
    NAN_ID,
    assert_same,
    bits,
    drawn_ids,
    held,
    held_by_row,
    run,
    tiny_model,
)

import qwen35.attention
import qwen35.delta_net
import qwen35.forward
from qwen35.errors import CacheError
from qwen35.layer_cache import DeltaCache, KVCache
from qwen35.model import prefill
from qwen35.rope import rope

# 0, 1, … K−1 = 3, K, more, and the whole width; three forwards.
LENGTHS = ([9, 0, 4, 3, 1, 2, 7], [0, 2, 5, 1, 3, 4, 5], [1, 1, 1, 1, 1, 1, 1])
WIDTHS = (9, 5, 1)
ROWS = 7


def ragged_batch(model, padding=0):
    """Run LENGTHS with `padding` as the ids of padding; return (cache, logits by forward)."""
    cache, logits, ids = model.make_cache(), [], drawn_ids(ROWS, sum(WIDTHS))
    start = 0
    for lengths, width in zip(LENGTHS, WIDTHS, strict=True):
        part = ids[:, start : start + width].copy()
        part[np.arange(width) >= np.array(lengths)[:, None]] = padding
        logits.append(run(model, part, cache, lengths=lengths))
        start += width
    return cache, logits


def claim_a_row_is_that_row_alone(dtype="float32", padding=0):
    model = tiny_model(dtype)
    batch, logits = ragged_batch(model, padding)
    ids = drawn_ids(ROWS, sum(WIDTHS))
    for row in range(ROWS):
        alone, start = model.make_cache(), 0
        for at, width in enumerate(WIDTHS):
            if (tokens := LENGTHS[at][row]) > 0:
                seen = run(model, ids[row : row + 1, start : start + tokens], alone)
                assert bits(logits[at][row : row + 1, :tokens]) == bits(seen), (row, at)
            start += width
        assert_same(held_by_row(batch, row), held_by_row(alone, 0))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_of_a_ragged_batch_is_that_row_alone(dtype):
    claim_a_row_is_that_row_alone(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_pads_a_row_does_not_matter_though_it_makes_nan(dtype):
    claim_a_row_is_that_row_alone(dtype, padding=NAN_ID)


class _Mx:
    """mlx.core with some functions replaced, for one module."""

    def __init__(self, **replacements):
        self.__dict__.update(replacements)

    def __getattr__(self, name):
        return getattr(mx, name)


def no_mask_in_the_recurrence(mp):
    real = qwen35.delta_net.gated_delta_update
    mp.setattr(qwen35.delta_net, "gated_delta_update", lambda *args: real(*args[:6]))


def tail_from_the_padded_end(mp):
    layer = qwen35.delta_net.GatedDeltaNet
    mp.setattr(layer, "_ragged_tail", lambda self, window, ends: self._owned_tail(window))


def advance_by_the_width(mp):
    mp.setattr(KVCache, "drop_right_padding", lambda self, padding: None)


def offset_by_the_width(mp):
    real = DeltaCache.advance
    width = lambda tokens: tokens if isinstance(tokens, int) else int(np.max(tokens))
    mp.setattr(DeltaCache, "advance", lambda self, tokens: real(self, width(tokens)))


def left_padding_seen(mp):
    real = qwen35.forward.attention_mask
    mp.setattr(qwen35.forward, "attention_mask", lambda left, *rest: real(0 * left, *rest))


FAULTS = [
    no_mask_in_the_recurrence,
    tail_from_the_padded_end,
    advance_by_the_width,
    offset_by_the_width,
    left_padding_seen,
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_the_claim_catches(fault, monkeypatch):
    fault(monkeypatch)
    with pytest.raises(AssertionError):
        claim_a_row_is_that_row_alone(padding=11)


def test_keys_of_padding_that_are_not_zeroed_are_caught(monkeypatch):
    monkeypatch.setattr(qwen35.attention, "mx", _Mx(where=lambda mask, x, y: x))
    with pytest.raises(AssertionError):
        claim_a_row_is_that_row_alone(padding=NAN_ID)


def claim_a_left_padded_row_is_that_row_alone(dtype="float32", padding=NAN_ID):
    """The same for a left-padded prompt; there padding comes into the first tokens' windows."""
    model, lengths, width = tiny_model(dtype), LENGTHS[0], WIDTHS[0]
    ids, batch = drawn_ids(ROWS, width + 2), model.make_cache()
    prompt = np.full((ROWS, width), padding, np.int32)
    for row, tokens in enumerate(lengths):
        prompt[row, width - tokens :] = ids[row, :tokens]
    logits = run(model, prompt, batch, lengths=lengths, padding="left")
    after = run(model, ids[:, width:], batch)
    for row, tokens in enumerate(lengths):
        alone = model.make_cache()
        if tokens:
            seen = run(model, ids[row : row + 1, :tokens], alone)
            assert bits(logits[row : row + 1, width - tokens :]) == bits(seen), row
        assert bits(after[row : row + 1]) == bits(run(model, ids[row : row + 1, width:], alone))
        assert_same(held_by_row(batch, row), held_by_row(alone, 0))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_of_a_left_padded_batch_is_that_row_alone(dtype):
    claim_a_left_padded_row_is_that_row_alone(dtype)


def test_a_convolution_that_sees_padding_is_caught(monkeypatch):
    where = lambda mask, x, y: x if mask.ndim == 3 else mx.where(mask, x, y)
    monkeypatch.setattr(qwen35.delta_net, "mx", _Mx(where=where))
    with pytest.raises(AssertionError):
        claim_a_left_padded_row_is_that_row_alone(padding=11)


def test_left_padding_comes_before_all_tokens():
    model = tiny_model()
    cache = model.make_cache()
    run(model, drawn_ids(2, 3), cache)
    before = held(cache)
    with pytest.raises(CacheError, match="left padding after tokens were seen: pad on the right"):
        run(model, drawn_ids(2, 3), cache, lengths=[3, 1], padding="left")
    assert_same(held(cache), before)


@pytest.mark.parametrize("seen", [0, 3])
def test_a_forward_of_empty_rows_leaves_every_state_as_it_was(seen):
    model = tiny_model()
    ids = drawn_ids(3, 8)
    with_it, without = model.make_cache(), model.make_cache()
    if seen:
        run(model, ids[:, :seen], with_it)
        run(model, ids[:, :seen], without)
    run(model, np.full((3, 2), NAN_ID, np.int32), with_it, lengths=[0, 0, 0])
    after, due = (run(model, ids[:, seen:], cache) for cache in (with_it, without))
    assert bits(after) == bits(due)
    for row in range(3):
        assert_same(held_by_row(with_it, row), held_by_row(without, row))


@pytest.mark.parametrize("padding", ["left", "right"])
def test_padding_alike_in_every_row_is_still_padding(padding):
    model, ids = tiny_model(), drawn_ids(2, 5)
    padded, plain = model.make_cache(), model.make_cache()
    prompt = np.full((2, 6), NAN_ID, np.int32)
    prompt[:, slice(3, 6) if padding == "left" else slice(3)] = ids[:, :3]
    run(model, prompt, padded, lengths=[3, 3], padding=padding)
    run(model, ids[:, :3], plain)
    assert bits(run(model, ids[:, 3:], padded)) == bits(run(model, ids[:, 3:], plain))
    for row in range(2):
        assert_same(held_by_row(padded, row), held_by_row(plain, row))


def test_permuted_rows_give_permuted_results():
    model, order = tiny_model(), [2, 0, 1]
    ids, lengths = drawn_ids(3, 6), [6, 2, 4]
    one, other = model.make_cache(), model.make_cache()
    run(model, ids, one, lengths=lengths)
    run(model, ids[order], other, lengths=[lengths[r] for r in order])
    for at, row in enumerate(order):
        assert_same(held_by_row(other, at), held_by_row(one, row))


@pytest.mark.parametrize("chunk", [1, 3, 4, 20])
def test_a_ragged_prompt_in_chunks_ends_as_in_one_forward(chunk):
    model = tiny_model()
    ids, lengths = drawn_ids(4, 9), [9, 0, 4, 5]
    whole, cut = model.make_cache(), model.make_cache()
    logits = run(model, ids, whole, lengths=lengths)
    last = prefill(model, mx.array(ids), cut, chunk, lengths=lengths)
    assert_same(held(cut), held(whole))
    for row in (0, 2, 3):
        assert bits(last[row, 0]) == bits(logits[row, lengths[row] - 1])


def test_states_keep_their_dtypes():
    for dtype, working in DTYPES.items():
        cache, logits = ragged_batch(tiny_model(dtype))
        assert {x.dtype for x in logits} == {working}
        for entry in cache:
            due = [working, mx.float32] if isinstance(entry, DeltaCache) else [working, working]
            assert [x.dtype for x in entry.arrays()] == due


def test_masks_are_made_once_a_forward(monkeypatch):
    made = []
    for name in ("token_mask", "attention_mask"):
        real = getattr(qwen35.forward, name)
        monkeypatch.setattr(
            qwen35.forward, name, lambda *args, n=name, f=real: made.append(n) or f(*args)
        )
    model = tiny_model()
    cache = model.make_cache()
    run(model, drawn_ids(2, 4), cache, lengths=[4, 4])
    assert made == []
    run(model, drawn_ids(2, 4), cache, lengths=[4, 1])
    assert made == ["token_mask"]
    run(model, drawn_ids(2, 4), cache, lengths=[4, 1])
    assert made == ["token_mask", "token_mask", "attention_mask"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_offset_a_row_rotates_as_that_number(dtype):
    x = mx.array(np.random.default_rng(0).normal(size=(3, 2, 5, 16))).astype(DTYPES[dtype])
    offsets = [0, 7, 200_000]
    together = rope(x, 8, 1e4, mx.array(offsets, mx.int32))
    for row, offset in enumerate(offsets):
        assert bits(together[row]) == bits(rope(x[row : row + 1], 8, 1e4, offset)[0])


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ([1, 2], "lengths has 2 entries for 3 rows"),
        ([1, 2, 5], "lengths is 5 in row 2: it can be from 0 to 4 there"),
        ([1, -1, 2], "lengths is -1 in row 1"),
        (np.array([1.0, 2.0, 3.0]), "give a whole number"),
    ],
)
def test_lengths_that_do_not_fit_are_refused_and_change_nothing(lengths, message):
    model = tiny_model()
    cache = model.make_cache()
    run(model, drawn_ids(3, 2), cache)
    before = held(cache)
    with pytest.raises(CacheError, match=message):
        run(model, drawn_ids(3, 4), cache, lengths=lengths)
    assert_same(held(cache), before)


def test_another_number_of_rows_is_refused():
    model = tiny_model()
    cache = model.make_cache()
    run(model, drawn_ids(3, 2), cache)
    with pytest.raises(CacheError, match="the cache has 3 rows and the forward 2"):
        run(model, drawn_ids(2, 2), cache)


def test_a_forward_of_no_columns_is_refused():
    model = tiny_model()
    with pytest.raises(CacheError, match="no tokens"):
        run(model, drawn_ids(3, 2)[:, :0], model.make_cache())
