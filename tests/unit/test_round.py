"""Speculative rounds: what is kept is what a forward of the kept tokens alone leaves."""

import mlx.core as mx
import numpy as np
import pytest
from tiny_models import DTYPES, assert_same, bits, drawn_ids, held, held_by_row, run, tiny_model

import qwen35.delta_net
import qwen35.round
from qwen35.delta import gated_delta_update, state_only_update
from qwen35.delta_net import GatedDeltaNet
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
