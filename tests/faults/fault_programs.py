"""Faults of state, patched into the implementation, and the shortest programs that show them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from faults.fault import Namespace, patched

import qwen35.cache
import qwen35.delta_net
import qwen35.round
from qwen35.cache import Cache
from qwen35.counts import of_rows, settled
from qwen35.delta_net import GatedDeltaNet
from qwen35.layer_cache import DeltaCache, KVCache

TAIL, STATE = "layers.0.linear_attn.conv_tail", "layers.0.linear_attn.recurrent_state"
COUNT, KEYS = "layers.0.linear_attn.offset", "layers.1.self_attn.keys"

PROMPT = {"op": "prefill", "ids": [[1, 2, 3, 4, 5, 6], [7, 8, 9, 10, 11, 12]]}
RAGGED = PROMPT | {"lengths": [6, 2]}
VERIFY = {"op": "verify", "ids": [[13, 14, 15, 16], [17, 18, 19, 20]]}
JOINING = {"op": "extend", "program": [{"op": "prefill", "ids": [[1, 2]]}]}
SNAPSHOT, RESTORE = {"op": "snapshot", "name": "a"}, {"op": "restore", "name": "a"}
DECODE = {"op": "decode", "ids": [[21], [22]]}


def accept(keep):
    return {"op": "accept", "keep": keep}


def replays(change):
    """Return a patch of the number of tokens replayed."""
    return patched(
        GatedDeltaNet,
        "replay",
        lambda real: lambda self, record, keep: real(self, record, change(keep)),
    )


def not_restored(slot):
    """Return a patch that leaves one slot as the verify forward left it."""

    def change(real):
        def rolled_back(layer, entry, keep):
            new = real(layer, entry, keep)
            setattr(new, slot, getattr(entry, slot))
            return new

        return rolled_back

    return patched(qwen35.round, "rolled_back", change)


def offsets_stay(real):
    """The filter chooses rows of states, and the first counts as they were."""

    def chosen(entry, rows, of):
        new = real(entry, rows, of)
        if isinstance(new, DeltaCache):
            new.offset = settled(of_rows(entry.offset, of)[: len(rows)])
        return new

    return chosen


def left_padding_dropped(real):
    def joined(entries, rows):
        new = real(entries, rows)
        if isinstance(new, KVCache):
            new.offset = new.width
        return new

    return joined


def shared_list(mp):
    """The snapshot shares its list with the cache, which goes on in place."""
    real, real_finish = Cache.snapshot, Cache.finish

    def snapshot(self):
        made = real(self)
        object.__setattr__(made, "layers", self.layers)
        return made

    def finish(self, layers, rows, tokens):
        shared = self.layers
        real_finish(self, layers, rows, tokens)
        shared[:] = layers
        self.layers = shared

    mp.setattr(Cache, "snapshot", snapshot)
    mp.setattr(Cache, "finish", finish)


def state_rounded(real):
    def advance(self, tokens):
        self.recurrent_state = self.recurrent_state.astype(mx.bfloat16).astype(mx.float32)
        real(self, tokens)

    return advance


def writes_in_place(mp):
    """Forwards change the entries that snapshots hold."""
    mp.setattr(Cache, "copies", lambda self: list(self.layers))


def record_kept(real):
    """A commit leaves the record where it was."""

    def with_record(entry, armed):
        new = real(entry, armed)
        if isinstance(new, DeltaCache) and not armed:
            new.record = entry.record
        return new

    return with_record


def by_the_width(real):
    widest = lambda tokens: tokens if isinstance(tokens, int) else int(np.max(tokens))
    return lambda self, tokens: real(self, widest(tokens))


def unmasked_conv(mp):
    """qkv [B, S, C] keeps what padding makes of it; later masks are of another shape."""

    def where(condition, x, y):
        return x if condition.ndim == 3 and x.ndim == 3 else mx.where(condition, x, y)

    mp.setattr(qwen35.delta_net, "mx", Namespace(where=where))


@dataclass(frozen=True)
class ProgramFault:
    """`patch` makes the fault; in `steps` the first difference is `tap` after moment `moment`."""

    patch: Callable[[pytest.MonkeyPatch], None]
    steps: list[dict[str, Any]]
    moment: int
    tap: str


FAULTS = {
    "one token replayed too few": ProgramFault(
        replays(lambda keep: keep - (keep > 0)), [VERIFY, accept(2)], 1, TAIL
    ),
    "one token replayed too many": ProgramFault(
        replays(lambda keep: keep + 1), [VERIFY, accept(2)], 1, TAIL
    ),
    "tail not restored": ProgramFault(not_restored("conv_tail"), [VERIFY, accept(1)], 1, TAIL),
    "state not restored": ProgramFault(
        not_restored("recurrent_state"), [VERIFY, accept(1)], 1, STATE
    ),
    "count not restored": ProgramFault(not_restored("offset"), [VERIFY, accept(1)], 1, COUNT),
    "keys not cut": ProgramFault(
        patched(qwen35.round, "cut", lambda real: lambda entry, width, offset, keep: entry),
        [VERIFY, accept(1)],
        1,
        KEYS,
    ),
    "tail from the padded end": ProgramFault(
        patched(
            GatedDeltaNet,
            "_ragged_tail",
            lambda real: lambda self, window, ends: self._owned_tail(window),
        ),
        [RAGGED],
        0,
        TAIL,
    ),
    "mask ignored in the recurrence": ProgramFault(
        patched(qwen35.delta_net, "gated_delta_update", lambda real: lambda *args: real(*args[:6])),
        [RAGGED],
        0,
        STATE,
    ),
    "mask ignored in the replay": ProgramFault(
        patched(qwen35.delta_net, "state_only_update", lambda real: lambda *args: real(*args[:5])),
        [VERIFY, accept([3, 1])],
        1,
        STATE,
    ),
    "count advanced by the width": ProgramFault(
        patched(DeltaCache, "advance", by_the_width), [RAGGED], 0, COUNT
    ),
    "keys advanced by the width": ProgramFault(
        patched(KVCache, "drop_right_padding", lambda real: lambda self, padding: None),
        [RAGGED],
        0,
        KEYS,
    ),
    "filter leaves the counts": ProgramFault(
        patched(qwen35.cache, "chosen", offsets_stay),
        [RAGGED, {"op": "filter", "rows": [1, 0]}],
        1,
        COUNT,
    ),
    "merge drops left padding": ProgramFault(
        patched(qwen35.cache, "joined", left_padding_dropped), [PROMPT, JOINING], 1, KEYS
    ),
    "state rounded between forwards": ProgramFault(
        patched(DeltaCache, "advance", state_rounded), [PROMPT | {"chunk": 4}], 1, STATE
    ),
    "snapshot shares a list": ProgramFault(
        shared_list, [PROMPT, SNAPSHOT, DECODE, RESTORE], 3, TAIL
    ),
}

UNMASKED_CONV = unmasked_conv
RECORD_KEPT = patched(qwen35.round, "with_record", record_kept)
WRITES_IN_PLACE = writes_in_place
"""Faults that no program shows: see their claims in program_claims."""
