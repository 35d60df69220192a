"""Speculative rounds: a forward of drafted tokens, of which only the first are kept.

    arm(cache); logits = model(drafted, cache); accept(model, cache, keep)   # or commit(cache)

Accepting a drafted tokens keeps a + 1: the forward begins with the token that was certain. States
are restored and advanced again from the recorded inputs, so they are those of a forward that saw
the kept tokens only, as far as its projections do not depend on the number of rows.
"""

from collections.abc import Sequence
from copy import copy

import numpy as np

from qwen35.cache import Cache
from qwen35.counts import Counts, checked
from qwen35.delta_net import GatedDeltaNet
from qwen35.errors import CacheError
from qwen35.layer_cache import DeltaCache, KVCache, LayerCache
from qwen35.model import Model
from qwen35.record import Round


def arm(cache: Cache) -> None:
    """Begin a round: the next forward is recorded, and can then be committed or cut short."""
    cache.check_usable()
    if cache.round is not None:
        raise CacheError("the cache is armed already: commit the round or accept tokens of it.")
    cache.layers = [with_record(entry, armed=True) for entry in cache.layers]
    cache.round = Round(
        tuple((e.width, e.offset) if isinstance(e, KVCache) else None for e in cache.layers)
    )


def commit(cache: Cache) -> None:
    """Keep all tokens and forget the record."""
    cache.check_usable()
    if cache.round is None:
        raise CacheError("commit without a round: arm the cache before the forward.")
    cache.layers = [with_record(entry, armed=False) for entry in cache.layers]
    cache.round = None


def accept(model: Model, cache: Cache, keep: int | Sequence[int]) -> None:
    """Keep the first `keep` tokens of the round's forward, one count or one a row.

    Raises CacheError, with nothing changed, without a recorded forward or for a `keep` below 0,
    above the tokens verified, or of another number of rows. If a layer fails, its error is raised
    and the cache is unusable from then on.
    """
    cache.check_usable()
    if cache.round is None or cache.round.verified is None or cache.rows is None:
        raise CacheError("accept without a recorded forward: arm the cache, then run one forward.")
    if any(isinstance(entry, DeltaCache) and entry.record is None for entry in cache.layers):
        raise CacheError("accept without a record: a linear layer did not record the forward.")
    kept = checked("keep", keep, cache.rows, cache.round.verified)
    try:
        layers: list[LayerCache] = []
        blocks = model.language_model.model.layers
        for block, entry, before in zip(blocks, cache.layers, cache.round.before, strict=True):
            if isinstance(entry, DeltaCache):
                layers.append(rolled_back(block.linear_attn, entry, kept))
            else:
                assert before is not None
                layers.append(cut(entry, *before, kept))
    except BaseException as error:
        cache.unusable = f"the rollback of layer {len(layers)} failed ({error!r})"
        raise
    cache.layers, cache.round = layers, None


def with_record(entry: LayerCache, armed: bool) -> LayerCache:
    """Return the entry, a linear one armed or not and without a record."""
    new = copy(entry)
    if isinstance(new, DeltaCache):
        new.armed, new.record = armed, None
    return new


def rolled_back(layer: GatedDeltaNet, entry: DeltaCache, keep: Counts) -> DeltaCache:
    """Return the entry as it was before its record, advanced by `keep` tokens."""
    assert entry.record is not None
    new = DeltaCache()
    new.conv_tail, new.recurrent_state = layer.replay(entry.record, keep)
    new.offset = entry.record.offset
    new.advance(keep)
    return new


def cut(entry: KVCache, width: int, offset: Counts, keep: Counts) -> KVCache:
    """Return the entry with `keep` tokens after the `offset` it had; its columns as few as can be.

    `width` is the number of columns before the round.
    """
    new = copy(entry)
    new.realign(new.left_padding, offset + keep, width + int(np.max(keep)))
    return new
