"""What is claimed of the implementation on any program: by properties, and caught for faults."""

import hashlib
from dataclasses import dataclass
from typing import Any, ClassVar

import mlx.core as mx
from tiny_models import NAN_ID, assert_same, held, tiny_model

from parity import policy
from parity.compare import Comparison
from parity.program import Program, parse
from parity.runners.append_only import AppendOnly
from parity.runners.impl_states import drive, impl_states, row_states
from parity.runners.mlx_arrays import to_numpy
from parity.states import States, compare_states
from qwen35.layer_cache import DeltaCache
from qwen35.model import Model
from qwen35.round import accept, arm, commit

RULES = {
    dtype: policy.load().pair("impl", "append-only", dtype)
    for dtype in ("float32", "float16", "bfloat16")
}


SIZES = {
    "hidden_size": 44,
    "num_attention_heads": 14,
    "num_key_value_heads": 7,
    "linear_num_key_heads": 5,
    "linear_num_value_heads": 15,
}
"""With the other sizes of tiny_models no two are alike, nor like the 1, 2 or 4 rows drawn."""

QK_SCALES = {1.0: 0.75, 1e-3: 1.0e-3, 1e-4: 1.0e-4}
"""Length of the vectors q and k of a head, before they are normalized -> scale of its weights."""


@dataclass(frozen=True)
class Candidate:
    """The implementation on a small random model; `sizes` are those that differ from SIZES."""

    dtype: str = "float32"
    qk_length: float = 1.0
    sizes: tuple[tuple[str, int], ...] = ()
    name: ClassVar[str] = "impl"

    @property
    def model(self) -> Model:
        return tiny_model(self.dtype, QK_SCALES[self.qk_length], **(SIZES | dict(self.sizes)))

    def states(self, program: Program) -> States:
        return impl_states(self.model, self.dtype, program)


def program(steps: list[dict[str, Any]]) -> Program:
    return parse({"schema": 1, "steps": steps})


def first_difference(candidate: Candidate, steps: list[dict[str, Any]]) -> Comparison | None:
    """Run the program and its tokens alone; return the first state that differs."""
    asked = program(steps)
    return difference(candidate.states(asked), AppendOnly(candidate).states(asked), candidate.dtype)


def difference(ours: States, theirs: States, dtype: str = "float32") -> Comparison | None:
    """Return the first state of two runs that differs."""
    found = compare_states(ours, theirs, RULES[dtype], ours.layer_types)
    assert found
    return next((c for c in found if c.failed), None)


def place(item: Comparison | None) -> tuple[int, str] | None:
    """Return (moment, name) of a difference."""
    return item and (item.forward, item.tap)


def claim_it_equals_its_tokens_alone(candidate: Candidate, steps: list[dict[str, Any]]) -> None:
    seen = first_difference(candidate, steps)
    assert seen is None, f"moment {seen.forward} {seen.tap} {seen.verdict}: {seen.detail}"


def last(candidate, steps):
    """Return the cache at the end of a program."""
    *_, (_, cache, _) = drive(candidate.model, program(steps))
    return cache


def states(candidate, cache):
    rows = [
        row_states(cache, r, candidate.model.config, candidate.dtype) for r in range(cache.rows)
    ]
    return States("impl", candidate.model.config.layer_types, {}, [rows])


def without_logits(row):
    return {name: value for name, value in row.items() if name != "logits"}


def claim_all_kept_is_a_commit(candidate, steps, draft):
    """Accepting all of a round after `steps` does what a commit does, and leaves no record."""
    ended = []
    for end in (lambda cache: accept(candidate.model, cache, draft.shape[1]), commit):
        cache = last(candidate, steps)
        arm(cache)
        candidate.model(mx.array(draft), cache)
        end(cache)
        assert cache.round is None
        for i, entry in enumerate(cache):
            if isinstance(entry, DeltaCache):
                assert not entry.armed
                assert entry.record is None, f"layer {i} holds a record"
        ended.append(cache)
    assert_same(held(ended[0]), held(ended[1]))


def claim_padding_on_the_left_is_none(candidate, rows, lengths):
    """Left padding, as in merged batches, leaves each row as right padding does."""
    tokens = len(rows[0])
    cache = candidate.model.make_cache()
    left = [[NAN_ID] * (tokens - n) + row[:n] for row, n in zip(rows, lengths, strict=True)]
    candidate.model(mx.array(left), cache, lengths=lengths, padding="left")
    step = {"op": "prefill", "ids": rows, "lengths": lengths}
    due = AppendOnly(candidate).states(program([step, step]))
    due.moments = [[without_logits(row) for row in due.moments[0]]]
    seen = difference(states(candidate, cache), due, candidate.dtype)
    assert seen is None, place(seen)


def claim_a_snapshot_stays(candidate, steps):
    """Take a snapshot after each moment outside a round; later steps change no byte of it."""
    taken = []
    for at, (moment, cache, _) in enumerate(drive(candidate.model, program(steps))):
        if moment.step.op != "verify":
            snapshot = cache.snapshot()
            taken.append((at, snapshot, digest(snapshot)))
    for at, snapshot, before in taken:
        assert digest(snapshot) == before, f"snapshot after moment {at}"


def digest(snapshot):
    text = hashlib.sha256(str(snapshot.rows).encode())
    for entry in snapshot.layers:
        text.update(str(entry.offset).encode())
        for value in entry.arrays():
            text.update(f"{value.shape} {value.dtype}".encode() + to_numpy(value).tobytes())
    return text.hexdigest()
