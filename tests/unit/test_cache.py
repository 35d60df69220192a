"""Cache operations: rows chosen and joined, trims, and what cannot be done."""

import mlx.core as mx
import numpy as np
import pytest
from tiny_models import DTYPES, assert_same, bits, drawn_ids, held, held_by_row, run, tiny_model

import qwen35.batch
import qwen35.cache
import qwen35.layer_cache
from qwen35.cache import Cache
from qwen35.errors import CacheError
from qwen35.layer_cache import DeltaCache, KVCache
from qwen35.round import arm

LENGTHS = [5, 0, 3, 2]


def alone(model, seed, tokens):
    """Return a cache of one row that saw `tokens` tokens."""
    cache = model.make_cache()
    if tokens:
        run(model, drawn_ids(1, tokens, seed), cache)
    return cache


def batch(model, lengths=LENGTHS):
    """Return a cache of rows of these lengths, row r the tokens of `alone(model, r, …)`."""
    width = max(lengths)
    ids = np.zeros((len(lengths), width), np.int32)
    for row, tokens in enumerate(lengths):
        ids[row, :tokens] = drawn_ids(1, tokens, row)[0]
    cache = model.make_cache()
    run(model, ids, cache, lengths=lengths)
    return cache


def claim_rows_go_on_as_if_alone(cache, seeds, lengths, model):
    """Row i of `cache` is `alone(seeds[i], lengths[i])`, now and after two more forwards."""
    caches = [alone(model, s, n) for s, n in zip(seeds, lengths, strict=True)]
    assert cache.rows in (None, len(seeds))
    for width in (2, 1):
        ids = drawn_ids(len(seeds), width, seed=9)
        logits = run(model, ids, cache)
        for row, one in enumerate(caches):
            assert bits(logits[row : row + 1]) == bits(run(model, ids[row : row + 1], one))
            assert_same(held_by_row(cache, row), held_by_row(one, 0))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [[2], [3, 2], [1], [0, 1, 2, 3], [3, 0, 0]], ids=str)
def test_rows_filtered_go_on_as_if_alone(rows, dtype):
    model = tiny_model(dtype)
    cache = batch(model)
    cache.filter(rows)
    claim_rows_go_on_as_if_alone(cache, rows, [LENGTHS[r] for r in rows], model)


def test_columns_that_pad_every_row_go():
    model = tiny_model()
    cache = batch(model)
    cache.filter([3, 2])
    assert (cache[1].width, list(cache[1].left_padding)) == (3, [1, 0])


@pytest.mark.parametrize("row", range(4))
def test_a_row_extracted_goes_on_as_if_alone_and_the_batch_stays(row):
    model = tiny_model()
    cache = batch(model)
    before = held(cache)
    one = cache.extract(row)
    if LENGTHS[row]:
        assert_same(held(one), held(alone(model, row, LENGTHS[row])))
    claim_rows_go_on_as_if_alone(one, [row], [LENGTHS[row]], model)
    assert_same(held(cache), before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lengths", [[5, 0, 3, 2], [0, 4], [0, 0], [3, 3], [6]], ids=str)
def test_rows_merged_go_on_as_if_alone(lengths, dtype):
    model = tiny_model(dtype)
    parts = [alone(model, row, n) for row, n in enumerate(lengths)]
    before = [held(part) for part in parts]
    cache = Cache.merge(parts)
    for part, state in zip(parts, before, strict=True):
        assert_same(held(part), state)
    claim_rows_go_on_as_if_alone(cache, range(len(lengths)), lengths, model)


def test_a_merge_of_rows_is_their_ragged_batch():
    model = tiny_model()
    parts = [alone(model, row, n) for row, n in enumerate(LENGTHS)]
    assert_same(held(Cache.merge(parts)), held(batch(model)))


@pytest.mark.parametrize(("ours", "theirs"), [(LENGTHS, [6]), ([1, 2], LENGTHS), (LENGTHS, [0])])
def test_rows_joined_go_on_as_if_alone(ours, theirs):
    model = tiny_model()
    cache, other = batch(model, ours), model.make_cache()
    seeds = [*range(len(ours)), *range(len(theirs))]
    if max(theirs):
        other = batch(model, theirs)
    cache.extend(other)
    claim_rows_go_on_as_if_alone(cache, seeds, [*ours, *theirs], model)


def offsets_not_chosen(mp):
    real = qwen35.cache.chosen

    def wrong(entry, rows, of):
        new = real(entry, rows, of)
        new.offset = entry.offset[: len(rows)] if not isinstance(entry.offset, int) else 0
        return new

    mp.setattr(qwen35.cache, "chosen", wrong)


def states_not_chosen(mp):
    real = qwen35.cache.chosen

    def wrong(entry, rows, of):
        new = real(entry, rows, of)
        if isinstance(new, DeltaCache):
            new.recurrent_state = entry.recurrent_state[: len(rows)]
        return new

    mp.setattr(qwen35.cache, "chosen", wrong)


def left_padding_dropped(mp):
    real = qwen35.cache.joined

    def wrong(entries, rows):
        new = real(entries, rows)
        if isinstance(new, KVCache):
            new.offset = new.width
        return new

    mp.setattr(qwen35.cache, "joined", wrong)


def padded_on_the_right(mp):
    def wrong(x, width):
        if x is None:
            return x
        return mx.pad(x, [(0, 0), (0, 0), (0, width - x.shape[2]), (0, 0)])

    mp.setattr(qwen35.batch, "left_padded", wrong)


@pytest.mark.parametrize("fault", [offsets_not_chosen, states_not_chosen])
def test_a_filter_that_forgets_is_caught(fault, monkeypatch):
    fault(monkeypatch)
    with pytest.raises(AssertionError):
        test_rows_filtered_go_on_as_if_alone([3, 2], "float32")


@pytest.mark.parametrize("fault", [left_padding_dropped, padded_on_the_right])
def test_a_merge_that_forgets_is_caught(fault, monkeypatch):
    fault(monkeypatch)
    with pytest.raises(AssertionError):
        test_rows_merged_go_on_as_if_alone([5, 3], "float32")


@pytest.mark.parametrize("tokens", [0, 2, [3, 1], [0, 4]], ids=str)
def test_an_attention_cache_trims_each_row(tokens):
    rng = np.random.default_rng(0)
    keys, values = (mx.array(rng.normal(size=(2, 5, 6, 16)).astype(np.float32)) for _ in "kv")
    cache = Cache([KVCache()], rows=2)
    cache[0].append(keys, values)
    cache.trim(tokens)
    for row, dropped in enumerate(np.broadcast_to(tokens, 2)):
        left, right = cache[0].row(row)
        assert bits(left) == bits(keys[row, :, : 6 - dropped])
        assert bits(right) == bits(values[row, :, : 6 - dropped])
    assert cache[0].width == 6 - np.min(tokens)


def test_a_trim_by_more_than_was_seen_is_refused():
    cache = Cache([KVCache()], rows=1)
    cache[0].append(mx.zeros((1, 5, 6, 16)), mx.zeros((1, 5, 6, 16)))
    with pytest.raises(CacheError, match="trim is 7 in row 0: it can be from 0 to 6 there"):
        cache.trim(7)


REFUSED = {
    "trim": (lambda c: c.trim(1), "a linear layer cannot trim: arm a round"),
    "no rows": (lambda c: c.filter([]), "no rows: keep at least one"),
    "row too high": (lambda c: c.filter([0, 4]), "row 4 of 4: rows are numbered 0 to 3"),
    "row below 0": (lambda c: c.extract(-1), "row -1 of 4"),
    "no caches": (lambda c: Cache.merge([]), "merge of no caches"),
    "depth": (lambda c: c.extend(Cache([DeltaCache()])), "caches of different depth"),
    "kind": (
        lambda c: c.extend(Cache([KVCache(), DeltaCache(), KVCache(), DeltaCache()])),
        "linear layers in different places",
    ),
    "dtype": (lambda c: c.extend(alone(tiny_model("bfloat16"), 0, 2)), "in one dtype"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_done_is_refused_and_changes_nothing(name):
    operation, message = REFUSED[name]
    cache = batch(tiny_model())
    before = held(cache)
    with pytest.raises(CacheError, match=message):
        operation(cache)
    assert_same(held(cache), before)


OPERATIONS = {
    "filter": lambda cache, other: cache.filter([0]),
    "extract": lambda cache, other: cache.extract(0),
    "merge": lambda cache, other: cache.extend(other),
    "snapshot": lambda cache, other: cache.snapshot(),
    "restore": lambda cache, other: cache.restore(other.snapshot()),
    "trim": lambda cache, other: cache.trim(1),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_in_a_round_only_forwards_are_allowed(name):
    model = tiny_model()
    cache = batch(model)
    arm(cache)
    with pytest.raises(CacheError, match=f"{name} in a round: commit the round"):
        OPERATIONS[name](cache, model.make_cache())
