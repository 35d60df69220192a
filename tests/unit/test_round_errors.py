"""Rounds that cannot be: clear errors, nothing changed; and what a record holds on to."""

import gc

import mlx.core as mx
import pytest
from tiny_models import assert_same, drawn_ids, held, run, tiny_model

import qwen35.round
from qwen35.delta_net import GatedDeltaNet
from qwen35.errors import CacheError
from qwen35.round import accept, arm, commit


def verified(model, rows=3):
    cache = model.make_cache()
    run(model, drawn_ids(rows, 4), cache)
    arm(cache)
    run(model, drawn_ids(rows, 3, seed=1), cache)
    return cache


@pytest.mark.parametrize(
    ("keep", "message"),
    [
        (-1, "keep is -1 in row 0: it can be from 0 to 3 there"),
        (4, "keep is 4 in row 0: it can be from 0 to 3 there"),
        ([1, 4, 2], "keep is 4 in row 1"),
        ([1, 2], "keep has 2 entries for 3 rows"),
        ([], "give a whole number, or one for each row"),
    ],
)
def test_a_keep_that_does_not_fit_is_refused_and_changes_nothing(keep, message):
    model = tiny_model()
    cache = verified(model)
    before = held(cache)
    with pytest.raises(CacheError, match=message):
        accept(model, cache, keep)
    assert_same(held(cache), before)
    accept(model, cache, 2)


def test_a_keep_beyond_a_ragged_row_is_refused():
    model = tiny_model()
    cache = model.make_cache()
    arm(cache)
    run(model, drawn_ids(2, 4), cache, lengths=[4, 1])
    with pytest.raises(CacheError, match="keep is 2 in row 1: it can be from 0 to 1 there"):
        accept(model, cache, 2)


def test_a_second_forward_in_a_round_is_refused_and_changes_nothing():
    model = tiny_model()
    cache = verified(model)
    before = held(cache)
    with pytest.raises(CacheError, match="a second forward in one round"):
        run(model, drawn_ids(3, 1), cache)
    assert_same(held(cache), before)
    commit(cache)
    run(model, drawn_ids(3, 1), cache)


def test_a_round_needs_arming_and_a_forward():
    model = tiny_model()
    cache = model.make_cache()
    with pytest.raises(CacheError, match="accept without a recorded forward"):
        accept(model, cache, 0)
    with pytest.raises(CacheError, match="commit without a round"):
        commit(cache)
    arm(cache)
    with pytest.raises(CacheError, match="armed already"):
        arm(cache)
    with pytest.raises(CacheError, match="accept without a recorded forward"):
        accept(model, cache, 0)
    commit(cache)
    run(model, drawn_ids(2, 3), cache)


def test_a_layer_without_a_record_is_refused_and_changes_nothing():
    model = tiny_model()
    cache = verified(model)
    before, record = held(cache), cache[2].record
    cache[2].record = None
    with pytest.raises(CacheError, match="a linear layer did not record the forward"):
        accept(model, cache, 2)
    assert_same(held(cache), before)
    cache[2].record = record
    accept(model, cache, 2)


def test_left_padding_in_a_round_is_refused():
    model = tiny_model()
    cache = model.make_cache()
    arm(cache)
    with pytest.raises(CacheError, match="left padding in a round"):
        run(model, drawn_ids(2, 4), cache, lengths=[4, 1], padding="left")


def test_a_verify_forward_that_fails_can_be_tried_again():
    model, ids = tiny_model(), drawn_ids(2, 7)
    cache, only = model.make_cache(), model.make_cache()
    for each in (cache, only):
        run(model, ids[:, :4], each)
    arm(cache)
    with pytest.raises(ZeroDivisionError):
        run(model, ids[:, 4:], cache, tap=lambda name, x: 1 / 0 if name == "logits" else x)
    run(model, ids[:, 4:], cache)
    accept(model, cache, 1)
    run(model, ids[:, 4:5], only)
    assert_same(held(cache), held(only))


def test_a_rollback_that_fails_makes_the_whole_cache_unusable(monkeypatch):
    model = tiny_model()
    cache = verified(model)
    blocks = model.language_model.model.layers
    real = GatedDeltaNet.replay

    def fails(self, record, keep):
        if self is blocks[2].linear_attn:
            raise RuntimeError("out of memory")
        return real(self, record, keep)

    monkeypatch.setattr(GatedDeltaNet, "replay", fails)
    with pytest.raises(RuntimeError, match="out of memory"):
        accept(model, cache, 2)
    monkeypatch.undo()
    uses = [
        lambda: run(model, drawn_ids(3, 1), cache),
        lambda: arm(cache),
        lambda: commit(cache),
        lambda: accept(model, cache, 2),
        lambda: cache.filter([0]),
        lambda: cache.extract(0),
        lambda: cache.extend(model.make_cache()),
        lambda: cache.snapshot(),
        lambda: cache.trim(1),
    ]
    for use in uses:
        with pytest.raises(CacheError, match=r"unusable: the rollback of layer 2 failed .*out of"):
            use()


@pytest.fixture
def exact_memory():
    """Let no buffer of another size be reused while measuring."""
    limit = mx.set_cache_limit(0)
    yield
    mx.set_cache_limit(limit)


def active_bytes_around_a_round(end):
    """Return the active bytes (before a round, during it, after `end`), the cache alone kept."""
    model, ids = tiny_model(), drawn_ids(2, 900)
    cache = model.make_cache()

    def settle():
        mx.eval([entry.arrays() for entry in cache])
        gc.collect()
        return mx.get_active_memory()

    mx.eval(run(model, ids[:, :200], cache))
    before = settle()
    arm(cache)
    mx.eval(run(model, ids[:, 200:240], cache))
    during = settle()
    end(model, cache)
    return before, during, settle()


@pytest.mark.parametrize(
    "end",
    [lambda model, cache: commit(cache), lambda model, cache: accept(model, cache, 3)],
    ids=["commit", "accept"],
)
def test_a_record_is_free_when_the_round_ends(exact_memory, end):
    active_bytes_around_a_round(end)  # makes the constants
    before, during, after = active_bytes_around_a_round(end)
    C, Hv, linear, rows = 2 * 2 * 8 + 6 * 12, 6, 2, 2
    inputs = 4 * linear * rows * 40 * (C + 2 * Hv)
    assert during - before >= inputs
    assert after == before


def test_a_record_kept_after_the_round_is_caught(exact_memory, monkeypatch):
    active_bytes_around_a_round(lambda model, cache: commit(cache))
    monkeypatch.setattr(qwen35.round, "commit", lambda cache: setattr(cache, "round", None))
    before, _, after = active_bytes_around_a_round(lambda m, cache: qwen35.round.commit(cache))
    assert after > before
