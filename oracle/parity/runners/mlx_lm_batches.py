"""Stateful programs on mlx-lm's own batch caches, each step the way its batch generator does it.

From 0.31.2 on its generator merges empty caches and pads prompts on the right (`prepare`, forwards,
`finalize`). Older ones cannot merge empty caches: they pad new prompts on the left, and only those
that go on from something on the right.
"""

import sys
from collections.abc import Iterator, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from parity.program import within_vocabulary
from parity.runners.mlx_arrays import to_numpy
from parity.states import LOGITS, RowStates
from parity.steps import Step
from qwen35.errors import CannotRunError


class Batch:
    """The rows of a session: `caches` has one of mlx-lm's batch caches a layer."""

    def __init__(self, model: nn.Module, vocabulary: int) -> None:
        self.model, self.vocabulary = model, vocabulary
        self.caches: list[Any] = []
        self._none: dict[int, mx.array] = {}  # attention layer -> [Hkv, 0, D] of its dtype

    def run(self, steps: Sequence[Step]) -> Iterator[list[RowStates]]:
        """Do the steps; yield every row's states after each moment, see `Program.moments`."""
        for step in steps:
            if step.ids.size:
                yield from self._forwards(step)
                continue
            if step.op == "filter":
                assert step.rows is not None
                for cache in self.caches:
                    cache.filter(mx.array(step.rows))
            elif step.op == "extract":
                # What is extracted knows no rows; the generator merges such before it goes on.
                self.caches = _merged([[cache.extract(step.row) for cache in self.caches]])
            elif step.op == "extend":
                joining = Batch(self.model, self.vocabulary)
                for _ in joining.run(step.program):
                    pass
                for cache, other in zip(self.caches, joining.caches, strict=True):
                    cache.extend(other)
            else:
                raise CannotRunError(f"mlx-lm cannot do {step.op}")
            yield self._rows()

    def _forwards(self, step: Step) -> Iterator[list[RowStates]]:
        padding = step.ids.shape[1] - step.counts
        if not self.caches:
            if padding.any() and not _merges_empty(self.model):
                yield self._left_padded(step, padding)
                return
            self.caches = empty(self.model, len(padding))
        if padding.any():
            for cache in self.caches:
                cache.prepare(lengths=step.counts.tolist(), right_padding=padding.tolist())
        held = np.zeros_like(padding)
        forwards = step.forwards()
        for number, (ids, counts) in enumerate(forwards, 1):
            logits = self._forward(ids)
            held += ids.shape[1] - counts
            if number == len(forwards) and padding.any():
                for cache in self.caches:
                    cache.finalize()
                held[:] = 0
            yield self._rows(logits, counts - 1, held)

    def _left_padded(self, step: Step, padding: np.ndarray) -> list[RowStates]:
        if len(step.forwards()) > 1:
            raise CannotRunError(
                "this mlx-lm pads new prompts on the left, so that its chunks hold other tokens "
                "than the program's. Leave out chunk, or name mlx-lm from 0.31.2 on."
            )
        self.caches = empty(self.model, len(padding), padding.tolist())
        width = step.ids.shape[1]
        column = (np.arange(width) - padding[:, None]) % width
        logits = self._forward(np.take_along_axis(step.ids, column, axis=1))
        return self._rows(logits, np.where(step.counts > 0, width - 1, -1))

    def _forward(self, ids: np.ndarray) -> mx.array:
        return self.model(mx.array(within_vocabulary(ids, self.vocabulary)), cache=self.caches)

    def _rows(
        self,
        logits: mx.array | None = None,
        last: np.ndarray | None = None,
        held: np.ndarray | None = None,
    ) -> list[RowStates]:
        """Read the caches, whose last `held` [B] columns are padding.

        `last` [B] is where each row's last token is in `logits`, -1 if there is none.
        """
        rows: list[dict[str, mx.array]] = []
        for i, cache in enumerate(self.caches):
            rows = rows or [{} for _ in range(_count(cache))]
            for row, states in enumerate(rows):
                over = 0 if held is None else int(held[row])
                states |= {f"layers.{i}.{n}": x for n, x in self._row(i, row, over).items()}
        if logits is not None and last is not None:
            for row, column in enumerate(last.tolist()):
                if column >= 0:
                    rows[row][LOGITS] = logits[row, column]
        mx.eval(rows)
        return [{name: to_numpy(x).copy() for name, x in states.items()} for states in rows]

    def _row(self, layer: int, row: int, over: int) -> dict[str, mx.array]:
        cache = self.caches[layer]
        if _is_linear(cache):
            return {
                "linear_attn.conv_tail": cache[0][row],
                "linear_attn.recurrent_state": cache[1][row],
            }
        start, tokens = cache.left_padding[row].item(), cache.offset[row].item() - over
        if cache.keys is None:  # so it makes of a row alone that has seen nothing
            keys = values = self._none[layer]
        else:
            self._none[layer] = cache.keys[row, :, :0]
            keys, values = (x[row, :, start : start + tokens] for x in (cache.keys, cache.values))
        return {
            "self_attn.keys": keys,
            "self_attn.values": values,
            "self_attn.offset": mx.array([tokens], mx.int32),
        }


def _is_linear(cache: Any) -> bool:
    return not hasattr(cache, "offset")


def _count(cache: Any) -> int:
    return len(cache[0] if _is_linear(cache) else cache.left_padding)


def _merged(caches: list[list[Any]]) -> list[Any]:
    """Return batch caches of these rows: rows of one cache a layer become one a layer."""
    return [layer[0].merge(list(layer)) for layer in zip(*caches, strict=True)]


def _merges_empty(model: nn.Module) -> bool:
    """Whether this mlx-lm's linear caches can be merged before their first token."""
    linear = next(filter(_is_linear, model.make_cache()), None)
    try:
        return linear is None or linear.merge([linear]) is not None
    except StopIteration:
        return False


def empty(model: nn.Module, rows: int, left_padding: list[int] | None = None) -> list[Any]:
    """Return batch caches that have seen nothing, as this mlx-lm's generator makes them."""
    if left_padding is None and _merges_empty(model):
        return _merged([model.make_cache() for _ in range(rows)])
    padding = left_padding or [0] * rows
    caches = model.make_cache()
    for i, cache in enumerate(caches):
        if _is_linear(cache):
            cache.left_padding = mx.array(padding)
        else:
            caches[i] = sys.modules[type(cache).__module__].BatchKVCache(padding)
    return caches
