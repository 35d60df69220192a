"""Driving `qwen35` through any program, and reading the states of each row."""

from collections.abc import Iterator

import mlx.core as mx
import numpy as np

import qwen35.round
from parity.program import Moment, Program, within_vocabulary
from parity.runners.mlx_arrays import run_info, to_numpy
from parity.states import LOGITS, RowStates, States
from qwen35.cache import Cache, Snapshot
from qwen35.config import TextConfig
from qwen35.counts import of_rows
from qwen35.layer_cache import DeltaCache
from qwen35.model import Model


def drive(model: Model, program: Program) -> Iterator[tuple[Moment, Cache, mx.array | None]]:
    """Run the program from an empty cache; yield each moment, the cache then, and its logits."""
    cache = model.make_cache()
    snapshots: dict[str, Snapshot] = {}
    for moment in program.moments():
        step, logits = moment.step, None
        if step.op == "verify":
            qwen35.round.arm(cache)
        if moment.is_forward:
            ids = mx.array(within_vocabulary(moment.ids, model.config.vocab_size))
            logits = model(ids, cache, lengths=None if step.lengths is None else moment.tokens)
        elif step.op == "accept":
            assert step.keep is not None
            qwen35.round.accept(model, cache, step.keep)
        elif step.op == "filter":
            assert step.rows is not None
            cache.filter(step.rows)
        elif step.op == "extract":
            assert step.row is not None
            cache = cache.extract(step.row)
        elif step.op == "extend":
            *_, (_, joining, _) = drive(model, Program(step.program, program.source))
            cache.extend(joining)
        elif step.op == "snapshot":
            assert step.name is not None
            snapshots[step.name] = cache.snapshot()
        else:
            assert step.name is not None
            cache.restore(snapshots[step.name])
        yield moment, cache, logits


def impl_states(model: Model, dtype: str, program: Program) -> States:
    """Run the program and return its states; see `parity.runners.base.StatefulRunner`."""
    program.check_vocabulary(model.config.vocab_size)
    found = States("impl", model.config.layer_types, run_info(dtype))
    for moment, cache, logits in drive(model, program):
        assert cache.rows is not None
        rows = [row_states(cache, row, model.config, dtype) for row in range(cache.rows)]
        if logits is not None:
            mx.eval(logits)
            last = to_numpy(logits)
            for row, count in enumerate(moment.tokens.tolist()):
                if count:
                    rows[row][LOGITS] = last[row, count - 1].copy()
        found.moments.append(rows)
    return found


def row_states(cache: Cache, row: int, config: TextConfig, dtype: str) -> RowStates:
    """Return what the cache holds of one row, zeros where it has seen nothing."""
    assert cache.rows is not None
    working: mx.Dtype = getattr(mx, dtype)
    states: dict[str, mx.array] = {}
    for i, entry in enumerate(cache):
        offset = mx.array(of_rows(entry.offset, cache.rows)[row : row + 1].astype(np.int32))
        if isinstance(entry, DeltaCache):
            tail, state = entry.conv_tail, entry.recurrent_state
            heads = config.linear_num_value_heads, config.linear_value_head_dim
            states |= {
                f"layers.{i}.linear_attn.conv_tail": mx.zeros(
                    (config.linear_conv_kernel_dim - 1, config.conv_dim), working
                )
                if tail is None
                else tail[row],
                f"layers.{i}.linear_attn.recurrent_state": mx.zeros(
                    (*heads, config.linear_key_head_dim), mx.float32
                )
                if state is None
                else state[row],
                f"layers.{i}.linear_attn.offset": offset,
            }
        else:
            none = mx.zeros((config.num_key_value_heads, 0, config.head_dim), working)
            keys, values = (none, none) if entry.keys is None else entry.row(row)
            states |= {
                f"layers.{i}.self_attn.keys": keys,
                f"layers.{i}.self_attn.values": values,
                f"layers.{i}.self_attn.offset": offset,
            }
    mx.eval(list(states.values()))
    return {name: to_numpy(value).copy() for name, value in states.items()}
