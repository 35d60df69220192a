"""Faults of ragged batches, patched into the implementation: mlx-lm catches each at its place."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import mlx.core as mx
import pytest
from batch_programs import Steps, compared, decodes, judged, prompt
from faults.fault import patched

import qwen35.batch
import qwen35.cache
import qwen35.delta_net
import qwen35.model
from qwen35.delta_net import GatedDeltaNet
from qwen35.layer_cache import DeltaCache, KVCache

TAIL, STATE = "layers.0.linear_attn.conv_tail", "layers.0.linear_attn.recurrent_state"
KEYS = "layers.3.self_attn.keys"

RAGGED = prompt(3, 6, lengths=[6, 1, 4])
FILTER = {"op": "filter", "rows": [2, 0, 1]}
EXTEND = {"op": "extend", "program": [prompt(1, 3)]}


def forward(change):
    """Return a patch of what the layers of a forward share."""
    return patched(
        qwen35.model,
        "make_forward",
        lambda real: lambda *args, **options: change(real(*args, **options)),
    )


def as_the_longest(made):
    """Rows are rotated as if all had seen what the longest has."""
    if made.positions is None:
        return made
    return replace(made, positions=mx.full(made.positions.shape, made.positions.max()))


def entry(function, change):
    """Return a patch of the entry that `function` makes: change(new, the entry or entries)."""

    def wrap(real):
        def made(given, *rest):
            new = real(given, *rest)
            change(new, given)
            return new

        return made

    return patched(qwen35.cache, function, wrap)


def offset_stays(new, old):
    new.offset = old.offset


def padding_is_tokens(new, old):
    if isinstance(new, KVCache):
        new.offset = new.width


def padded_right(real):
    def padded(x, width):
        return mx.pad(x, [(0, 0), (0, 0), (0, width - x.shape[2]), (0, 0)])

    return padded


@dataclass(frozen=True)
class BatchFault:
    """`patch` makes the fault; in `steps` the first difference is `tap` of `row` at `moment`."""

    patch: Callable[[pytest.MonkeyPatch], None]
    steps: Steps
    moment: int
    tap: str
    row: int
    verdict: str = "exceeds"


FAULTS = {
    "the tail is that of the padded end": BatchFault(
        patched(
            GatedDeltaNet,
            "_ragged_tail",
            lambda real: lambda self, window, ends: self._owned_tail(window),
        ),
        [RAGGED],
        0,
        TAIL,
        1,
    ),
    "padding moves the state": BatchFault(
        patched(
            qwen35.delta_net,
            "gated_delta_update",
            lambda real: lambda q, k, v, g, beta, state, mask: real(q, k, v, g, beta, state, None),
        ),
        [RAGGED],
        0,
        STATE,
        1,
    ),
    "padding stays among the keys": BatchFault(
        patched(KVCache, "drop_right_padding", lambda real: lambda self, padding: None),
        [RAGGED],
        0,
        KEYS,
        1,
        "shape",
    ),
    "lengths ignored": BatchFault(
        patched(
            qwen35.model,
            "make_forward",
            lambda real: (
                lambda layers, rows, tokens, lengths, *rest: real(
                    layers, rows, tokens, tokens, *rest
                )
            ),
        ),
        [RAGGED],
        0,
        TAIL,
        1,
    ),
    "rows rotated as the longest": BatchFault(
        forward(as_the_longest), [RAGGED, *decodes(3)], 1, KEYS, 1
    ),
    "left padding attended": BatchFault(
        forward(lambda made: replace(made, attention_mask=None)),
        [RAGGED, *decodes(3)],
        1,
        "layers.4.linear_attn.conv_tail",
        1,
    ),
    "rows filtered in the cache's order": BatchFault(
        patched(
            qwen35.cache,
            "chosen",
            lambda real: lambda entry, rows, of: real(entry, sorted(rows), of),
        ),
        [RAGGED, FILTER],
        1,
        TAIL,
        0,
    ),
    "offsets not filtered": BatchFault(
        entry("chosen", offset_stays), [RAGGED, FILTER], 1, KEYS, 0, "shape"
    ),
    "left padding dropped at extend": BatchFault(
        entry("joined", padding_is_tokens), [RAGGED, EXTEND], 1, KEYS, 1, "shape"
    ),
    "shorter rows joined on the wrong side": BatchFault(
        patched(qwen35.batch, "left_padded", padded_right), [RAGGED, EXTEND], 1, KEYS, 3
    ),
    "the state of joining rows lost": BatchFault(
        entry(
            "joined",
            lambda new, old: (
                isinstance(new, DeltaCache)
                and setattr(new, "recurrent_state", mx.zeros_like(new.recurrent_state))
            ),
        ),
        [RAGGED, EXTEND],
        1,
        STATE,
        0,
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_mlx_lm_catches_the_fault_and_names_moment_state_and_row(name, monkeypatch, checkpoints):
    fault = FAULTS[name]
    fault.patch(monkeypatch)
    first = next(c for c in compared(checkpoints, fault.steps) if c.failed)
    assert (first.forward, first.tap, first.row, first.verdict) == (
        fault.moment,
        fault.tap,
        fault.row,
        fault.verdict,
    )


@pytest.mark.parametrize("name", FAULTS)
def test_without_the_fault_the_same_program_holds(name, checkpoints):
    found = compared(checkpoints, FAULTS[name].steps)
    assert [c for c in found if c.failed] == []


def test_a_run_reports_the_row(monkeypatch, checkpoints):
    FAULTS["offsets not filtered"].patch(monkeypatch)
    value = judged(checkpoints, [RAGGED, FILTER])
    first = value["first_divergence"]
    assert value["verdict"] == "differs"
    assert (first["step_label"], first["tap"], first["row"]) == ("filter 2 0 1", KEYS, 0)
