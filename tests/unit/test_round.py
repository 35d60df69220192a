"""Speculative rounds: what is kept is what a forward of the kept tokens alone leaves."""

import gc

import mlx.core as mx
import numpy as np
import pytest
from tiny_models import DTYPES, assert_same, bits, drawn_ids, held, held_by_row, run, tiny_model

import qwen35.delta_net
import qwen35.round
from qwen35.delta import gated_delta_update, state_only_update
from qwen35.delta_net import GatedDeltaNet
from qwen35.errors import CacheError
from qwen35.layer_cache import KVCache
from qwen35.round import accept, arm, commit

PROMPT, DRAFT = 6, 5
KEEPS = [0, 1, 2, 4, 5, [0, 5, 3], [2, 2, 2], [0, 0, 1], [1, 4, 0]]  # K−1 = 3 lies between


def claim_a_round_leaves_the_kept_tokens(keep, dtype="float32", prompt=PROMPT, lengths=None):
    """Verify DRAFT tokens, keep some; compare with the run that only ever saw those."""
    model, ids = tiny_model(dtype), drawn_ids(3, PROMPT + DRAFT + 2)
    seen, draft = ids[:, :prompt], ids[:, PROMPT : PROMPT + DRAFT]
    cut, only = model.make_cache(), model.make_cache()
    for cache in (cut, only):
        if prompt:
            run(model, seen, cache)
    arm(cut)
    run(model, draft, cut, lengths=lengths)
    accept(model, cut, keep)
    kept = np.broadcast_to(keep, 3).tolist()
    if longest := max(kept):
        run(model, draft[:, :longest], only, lengths=kept)
    assert_same(held(cut), held(only))
    for start in (PROMPT + DRAFT, PROMPT + DRAFT + 1):
        token = ids[:, start : start + 1]
        assert bits(run(model, token, cut)) == bits(run(model, token, only))
    assert_same(held(cut), held(only))


@pytest.mark.parametrize("keep", KEEPS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_round_leaves_the_kept_tokens(keep, dtype):
    claim_a_round_leaves_the_kept_tokens(keep, dtype)


@pytest.mark.parametrize("keep", KEEPS[1:], ids=str)
def test_also_when_it_had_the_first_tokens_ever(keep):
    claim_a_round_leaves_the_kept_tokens(keep, prompt=0)


@pytest.mark.parametrize("keep", [0, 1, [4, 0, 2], [3, 1, 0]], ids=str)
@pytest.mark.parametrize("prompt", [0, PROMPT])
def test_also_when_the_draft_was_ragged(keep, prompt):
    if not prompt and keep == 0:
        return claim_nothing_kept_of_nothing()
    return claim_a_round_leaves_the_kept_tokens(keep, prompt=prompt, lengths=[5, 1, 3])


def claim_nothing_kept_of_nothing():
    model = tiny_model()
    cache = model.make_cache()
    arm(cache)
    run(model, drawn_ids(3, 5), cache, lengths=[5, 1, 3])
    accept(model, cache, 0)
    assert all(getattr(entry, "recurrent_state", None) is None for entry in cache)
    assert [entry.offset for entry in cache] == [0] * len(cache)
    fresh = model.make_cache()
    ids = drawn_ids(3, 4, seed=1)
    assert bits(run(model, ids, cache)) == bits(run(model, ids, fresh))
    assert_same(held(cache), held(fresh))


def claim_each_row_is_as_if_it_had_been_alone(keep):
    model, ids = tiny_model(), drawn_ids(3, 9)
    batch = model.make_cache()
    run(model, ids[:, :4], batch)
    arm(batch)
    run(model, ids[:, 4:], batch)
    accept(model, batch, keep)
    for row, kept in enumerate(keep):
        alone = model.make_cache()
        run(model, ids[row : row + 1, :4], alone)
        if kept:
            run(model, ids[row : row + 1, 4 : 4 + kept], alone)
        assert_same(held_by_row(batch, row), held_by_row(alone, 0))


@pytest.mark.parametrize("keep", [[0, 4, 2], [1, 3, 2], [2, 2, 2]], ids=str)
def test_each_row_is_as_if_it_had_been_alone(keep):
    claim_each_row_is_as_if_it_had_been_alone(keep)


def test_nothing_kept_gives_back_the_very_arrays():
    model, ids = tiny_model(), drawn_ids(2, 8)
    cache = model.make_cache()
    run(model, ids[:, :5], cache)
    before = [cache[0].conv_tail, cache[0].recurrent_state]
    arm(cache)
    run(model, ids[:, 5:], cache)
    accept(model, cache, 0)
    assert cache[0].conv_tail is before[0]
    assert cache[0].recurrent_state is before[1]


def test_all_kept_is_a_commit():
    model, ids = tiny_model("bfloat16"), drawn_ids(2, 9)
    accepted, committed = model.make_cache(), model.make_cache()
    for cache in (accepted, committed):
        run(model, ids[:, :5], cache)
        arm(cache)
        run(model, ids[:, 5:], cache)
    accept(model, accepted, 4)
    commit(committed)
    assert_same(held(accepted), held(committed))


def test_two_rounds_in_a_row():
    model, ids = tiny_model(), drawn_ids(2, 14)
    cut, only = model.make_cache(), model.make_cache()
    for cache in (cut, only):
        run(model, ids[:, :3], cache)
    for start, keep in ((3, [1, 3]), (7, [4, 0])):
        arm(cut)
        run(model, ids[:, start : start + 4], cut)
        accept(model, cut, keep)
        run(model, ids[:, start : start + max(keep)], only, lengths=keep)
    assert_same(held(cut), held(only))


def test_the_state_only_update_leaves_the_state_of_the_whole_one():
    rng = np.random.default_rng(3)
    draw = lambda *shape: mx.array(rng.normal(size=shape).astype(np.float32))
    q, k, v = draw(3, 5, 2, 8), draw(3, 5, 2, 8), draw(3, 5, 6, 12)
    g, beta = mx.sigmoid(draw(3, 5, 6)), mx.sigmoid(draw(3, 5, 6))
    state, ends = draw(3, 6, 12, 8), mx.array([5, 0, 2])
    mask = mx.arange(5) < ends[:, None]
    for limit, masked in ((None, None), (ends, mask)):
        _, whole = gated_delta_update(q, k, v, g, beta, state, masked)
        assert bits(state_only_update(k, v, g, beta, state, limit)) == bits(whole)


def replays(change):
    """Return a patch of the tokens replayed."""
    real = GatedDeltaNet.replay
    return lambda mp: mp.setattr(
        GatedDeltaNet, "replay", lambda self, record, keep: real(self, record, change(keep))
    )


def slot_not_restored(slot):
    """Return a patch that leaves one of the two slots as the verify forward left it."""

    def patch(mp):
        real = qwen35.round.rolled_back

        def leaves(layer, entry, keep):
            new = real(layer, entry, keep)
            setattr(new, slot, getattr(entry, slot))
            return new

        mp.setattr(qwen35.round, "rolled_back", leaves)

    return patch


FAULTS = {
    "one token short": replays(lambda keep: np.maximum(keep, 1) - 1),
    "one token long": replays(lambda keep: keep + 1),
    "tail not restored": slot_not_restored("conv_tail"),
    "state not restored": slot_not_restored("recurrent_state"),
    "tail from the padded end": lambda mp: mp.setattr(
        GatedDeltaNet, "_ragged_tail", lambda self, window, ends: self._owned_tail(window)
    ),
    "rows not stopped": lambda mp: mp.setattr(
        qwen35.delta_net, "state_only_update", lambda *args: state_only_update(*args[:5])
    ),
    "attention not cut": lambda mp: mp.setattr(
        qwen35.round, "cut", lambda entry, width, offset, keep: entry
    ),
    "attention cut alike": lambda mp: mp.setattr(
        KVCache,
        "realign",
        lambda self, start, offset, width: self.__dict__.update(width=width, offset=width),
    ),
    "count not restored": slot_not_restored("offset"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_the_claim_catches(name, monkeypatch):
    FAULTS[name](monkeypatch)
    with pytest.raises(AssertionError):
        claim_each_row_is_as_if_it_had_been_alone([1, 4, 2])


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
