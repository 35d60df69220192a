"""What a cache holds is safe: snapshots, forwards that fail, and nothing growing behind it."""

import hashlib
import io
import statistics

import mlx.core as mx
import pytest
from tiny_models import assert_same, bits, drawn_ids, held, run, tiny_model

from qwen35.cache import Cache
from qwen35.layer_cache import DeltaCache, KVCache


def digest(snapshot):
    """Hash every byte a snapshot holds, room for further tokens left out."""
    return hashlib.sha256(repr(held(Cache(snapshot.layers, snapshot.rows))).encode()).hexdigest()


def claim_later_steps_leave_a_snapshot_alone():
    model, ids = tiny_model(), drawn_ids(2, 12)
    cache = model.make_cache()
    run(model, ids[:, :4], cache)
    snapshot = cache.snapshot()
    room = [[bits(x) for x in entry.arrays()] for entry in snapshot.layers]
    before = digest(snapshot)
    first = run(model, ids[:, 4:6], cache)
    run(model, ids[:, 6:9], cache, lengths=[3, 1])
    cache.filter([1])
    assert digest(snapshot) == before
    assert [[bits(x) for x in entry.arrays()] for entry in snapshot.layers] == room
    for _ in range(2):
        cache.restore(snapshot)
        assert bits(run(model, ids[:, 4:6], cache)) == bits(first)
        assert digest(snapshot) == before


def test_later_steps_leave_a_snapshot_alone():
    claim_later_steps_leave_a_snapshot_alone()


def written_in_place(mp):
    """Write new keys to the very object that a snapshot holds."""
    real = KVCache._with_room

    def with_room(self, buffer, new, end):
        fits = buffer is not None and end <= buffer.shape[2]
        return buffer if fits else real(self, buffer, new, end)

    mp.setattr(KVCache, "_with_room", with_room)


def entries_shared(mp):
    mp.setattr(Cache, "copies", lambda self: list(self.layers))


def list_shared(mp):
    finish, snapshot = Cache.finish, Cache.snapshot

    def in_place(self, layers, *rest):
        held = self.layers
        finish(self, layers, *rest)
        held[:], self.layers = layers, held

    def sharing(self):
        taken = snapshot(self)
        object.__setattr__(taken, "layers", self.layers)
        return taken

    mp.setattr(Cache, "finish", in_place)
    mp.setattr(Cache, "snapshot", sharing)


@pytest.mark.parametrize("fault", [written_in_place, entries_shared, list_shared])
def test_a_snapshot_that_shares_is_caught(fault, monkeypatch):
    fault(monkeypatch)
    with pytest.raises(AssertionError):
        claim_later_steps_leave_a_snapshot_alone()


def test_a_snapshot_copies_no_bytes():
    model = tiny_model()
    cache = model.make_cache()
    run(model, drawn_ids(2, 40), cache)
    mx.eval([entry.arrays() for entry in cache])
    before = mx.get_active_memory()
    snapshot = cache.snapshot()
    assert mx.get_active_memory() == before
    assert snapshot.layers[0].recurrent_state is cache[0].recurrent_state


class Injected(Exception):
    pass


def raising_at(place):
    """Return a tap that raises at the tap of that name."""

    def tap(name, value):
        if name == place:
            raise Injected(place)
        return value

    return tap


PLACES = [
    "embed_tokens",
    *(f"layers.{i}.{name}" for i in (0, 2) for name in ("linear_attn.conv_tail", "output")),
    *(f"layers.{i}.{name}" for i in (1, 3) for name in ("self_attn.keys", "self_attn.out")),
    "logits",
]


def claim_a_failed_forward_changes_nothing(place, **options):
    model, ids = tiny_model(), drawn_ids(2, 9)
    cache, spared = model.make_cache(), model.make_cache()
    for each in (cache, spared):
        run(model, ids[:, :4], each)
    before = held(cache)
    with pytest.raises(Injected):
        run(model, ids[:, 4:7], cache, tap=raising_at(place), **options)
    assert_same(held(cache), before)
    assert bits(run(model, ids[:, 7:], cache)) == bits(run(model, ids[:, 7:], spared))
    assert_same(held(cache), held(spared))


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("options", [{}, {"lengths": [3, 1]}, {"eval_layers": True}], ids=str)
def test_a_failed_forward_changes_nothing(place, options):
    claim_a_failed_forward_changes_nothing(place, **options)


def test_a_forward_on_the_cache_itself_is_caught(monkeypatch):
    entries_shared(monkeypatch)
    with pytest.raises(AssertionError):
        claim_a_failed_forward_changes_nothing("logits")


def edges_and_bytes_over_decodes(model, decodes):
    """Return (lines of the graph behind the caches, active bytes) after each decode."""
    cache, seen = model.make_cache(), []
    run(model, drawn_ids(4, 5), cache, lengths=[5, 0, 3, 2])
    for step in range(decodes):
        mx.eval(run(model, drawn_ids(4, 1, seed=step), cache))
        text = io.StringIO()
        mx.export_to_dot(text, *(x for entry in cache for x in entry.arrays()))
        seen.append((text.getvalue().count("\n"), mx.get_active_memory()))
    return seen


def test_nothing_grows_behind_the_caches_over_decodes():
    seen = edges_and_bytes_over_decodes(tiny_model(), 60)
    edges, active = zip(*seen, strict=True)
    assert len(set(edges[3:])) == 1
    # Buffers on their way back make single readings differ by a few kB.
    assert statistics.median(active[40:]) - statistics.median(active[3:23]) < 1024


def test_a_count_kept_as_a_lazy_array_is_caught(monkeypatch):
    real, arrays = DeltaCache.advance, DeltaCache.arrays

    def advance(self, tokens):
        real(self, tokens)
        self.lazy = getattr(self, "lazy", mx.array(0)) + 1

    monkeypatch.setattr(DeltaCache, "advance", advance)
    monkeypatch.setattr(DeltaCache, "arrays", lambda self: [*arrays(self), self.lazy])
    edges = [x[0] for x in edges_and_bytes_over_decodes(tiny_model(), 20)]
    assert edges[-1] - edges[3] >= 16
