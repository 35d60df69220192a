"""Whatever a program did, each row is left as if it had only ever had its tokens, alone."""

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from program_claims import (
    QK_SCALES,
    SIZES,
    Candidate,
    claim_a_snapshot_stays,
    claim_all_kept_is_a_commit,
    claim_it_equals_its_tokens_alone,
    claim_padding_on_the_left_is_none,
    difference,
    program,
    without_logits,
)
from program_strategies import (
    appending_programs,
    ids,
    padded,
    partitions,
    prefills,
    programs,
    rollbacks,
)
from tiny_models import NAN_ID

from parity.program import load
from parity.runners.impl_states import drive
from parity.runners.mlx_arrays import to_numpy
from parity.states import States
from qwen35.layer_cache import DeltaCache

COINCIDENCES = {
    "rows = kv heads": ({"num_key_value_heads": 2, "num_attention_heads": 4}, 2, None),
    "rows = Dk": ({"linear_key_head_dim": 3}, 3, None),
    "rows = Dv": ({"linear_value_head_dim": 4}, 4, None),
    "rows = kept": ({"linear_conv_kernel_dim": 4}, 3, None),
    "Dk = Dv": ({"linear_key_head_dim": 8, "linear_value_head_dim": 8}, None, None),
    "Hk = Hv": ({"linear_num_key_heads": 5, "linear_num_value_heads": 5}, None, None),
    "T = heads": ({"num_attention_heads": 6, "num_key_value_heads": 6}, None, 6),
    "K = 2": ({"linear_conv_kernel_dim": 2}, None, None),
}
"""Name -> (sizes, rows, tokens of the first forward). A kernel of one tap, K = 1, is refused."""


CANDIDATES = st.builds(
    Candidate, st.sampled_from(["float32", "bfloat16", "float16"]), st.sampled_from([*QK_SCALES])
)


@pytest.mark.parametrize("length", QK_SCALES)
def test_q_and_k_are_as_long_as_said(length):
    candidate, taken = Candidate(qk_length=length), {}
    cache = candidate.model.make_cache()
    candidate.model(mx.arange(40)[None], cache, lambda name, x: taken.setdefault(name, x))
    for layer in (0, 2):
        heads = 2 * SIZES["linear_num_key_heads"]
        q_and_k = to_numpy(taken[f"layers.{layer}.linear_attn.conv_out"])[..., : heads * 8]
        norms = np.linalg.norm(q_and_k.reshape(40, heads, 8), axis=-1)
        assert 0.5 * length < np.median(norms) < 2 * length


def decode(*tokens):
    return {"op": "decode", "ids": [[token] for token in tokens]}


EMPTY = {"op": "prefill", "ids": [[1, 2, 3], [4, 5, 6]], "lengths": [0, 0]}
NEW = {"op": "verify", "ids": [[1, 2, 3, 4, 5], [6, 7, 8, 9, 10]]}
NONE_KEPT = {"op": "accept", "keep": 0}


FILES = sorted((Path(__file__).parents[2] / "fixtures" / "programs").glob("*.json"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_recorded_program_leaves_the_states_of_its_tokens_alone(path, dtype):
    steps = [step.to_json() for step in load(path).steps]
    claim_it_equals_its_tokens_alone(Candidate(dtype), steps)


def test_there_are_recorded_programs():
    assert len(FILES) >= 6


@given(CANDIDATES, programs())
@example(Candidate(), [EMPTY, decode(7, 8)])
@example(Candidate(), [EMPTY, NEW, NONE_KEPT, decode(7, 8)])
@example(Candidate(), [NEW, NONE_KEPT, NEW, {"op": "accept", "keep": [1, 0]}, decode(7, 8)])
@example(Candidate(), [NEW, NONE_KEPT, {"op": "filter", "rows": [1]}, decode(7)])
@example(Candidate(), [NEW, NONE_KEPT, {"op": "extend", "program": [EMPTY]}])
def test_any_program_leaves_the_states_of_its_tokens_alone(candidate, steps):
    claim_it_equals_its_tokens_alone(candidate, steps)


@pytest.mark.parametrize("name", COINCIDENCES)
@given(data=st.data())
def test_also_where_two_sizes_are_the_same(name, data):
    sizes, rows, width = COINCIDENCES[name]
    candidate = Candidate(sizes=tuple(sizes.items()))
    claim_it_equals_its_tokens_alone(candidate, data.draw(programs(rows, width)))


@given(CANDIDATES, rollbacks())
def test_rollbacks_in_a_row_leave_what_was_kept_and_decode_on(candidate, steps):
    claim_it_equals_its_tokens_alone(candidate, steps)


@given(CANDIDATES, st.integers(1, 4), st.data())
def test_nothing_kept_restores(candidate, rows, data):
    steps = data.draw(appending_programs(rows))
    draft = {"op": "verify", "ids": data.draw(ids(rows, 5))}
    found = candidate.states(program([*steps, draft, NONE_KEPT]))
    before, after = (
        States("impl", found.layer_types, {}, [[without_logits(r) for r in found.moments[at]]])
        for at in (-3, -1)
    )
    assert difference(after, before, candidate.dtype) is None


@given(CANDIDATES, st.integers(1, 4), st.data())
def test_all_kept_is_a_commit_and_leaves_no_record(candidate, rows, data):
    steps = data.draw(appending_programs(rows))
    claim_all_kept_is_a_commit(candidate, steps, np.array(data.draw(ids(rows, 5))))


@given(CANDIDATES, st.integers(2, 4), st.data())
def test_permuting_the_rows_permutes_the_states(candidate, rows, data):
    steps = data.draw(appending_programs(rows))
    order = data.draw(st.permutations(range(rows)))
    permuted = [{name: in_order(value, order) for name, value in step.items()} for step in steps]
    found, other = candidate.states(program(steps)), candidate.states(program(permuted))
    other.moments = [[held[order.index(row)] for row in range(rows)] for held in other.moments]
    assert difference(other, found, candidate.dtype) is None


def in_order(value, order):
    return [value[row] for row in order] if isinstance(value, list) else value


@given(CANDIDATES, st.integers(1, 4), st.data())
def test_what_pads_never_matters(candidate, rows, data):
    step, more = data.draw(prefills(rows, ragged=True)), data.draw(prefills(rows, ragged=True))
    found = candidate.states(program([step, more]))
    for content in (NAN_ID, 2**31, -(2**62)):
        other = candidate.states(program([padded(step, content), padded(more, content)]))
        assert difference(other, found, candidate.dtype) is None


@given(CANDIDATES, st.integers(1, 4), st.integers(1, 9), st.data())
def test_padding_on_the_left_leaves_a_row_alone(candidate, rows, tokens, data):
    lengths = data.draw(st.lists(st.integers(0, tokens), min_size=rows, max_size=rows))
    claim_padding_on_the_left_is_none(candidate, data.draw(ids(rows, tokens)), lengths)


@given(CANDIDATES, st.integers(1, 3), st.integers(1, 24), st.data())
def test_any_partition_of_a_prompt_gives_its_states_and_last_logits(candidate, rows, total, data):
    prompt = np.array(data.draw(ids(rows, total)))
    widths = data.draw(partitions(total))
    parts = np.split(prompt, np.cumsum(widths)[:-1], axis=1)
    whole = candidate.states(program([{"op": "prefill", "ids": prompt.tolist()}]))
    cut = candidate.states(program([{"op": "prefill", "ids": p.tolist()} for p in parts]))
    assert "logits" in cut.moments[-1][0]
    cut.moments = cut.moments[-1:]
    assert difference(cut, whole, candidate.dtype) is None


@given(CANDIDATES, programs())
def test_nothing_is_promoted_or_rounded(candidate, steps):
    for moment, cache, logits in drive(candidate.model, program(steps)):
        working = getattr(mx, candidate.dtype)
        if moment.is_forward:
            assert logits.dtype == working
        for entry in cache:
            if isinstance(entry, DeltaCache):
                held = (entry.conv_tail, working), (entry.recurrent_state, mx.float32)
            else:
                held = (entry.keys, working), (entry.values, working)
            assert all(value is None or value.dtype == due for value, due in held)


@given(CANDIDATES, programs())
def test_a_round_leaves_no_record_after_its_accept(candidate, steps):
    for moment, cache, _ in drive(candidate.model, program(steps)):
        in_round = moment.step.op == "verify"
        assert (cache.round is not None) == in_round
        for entry in cache:
            if isinstance(entry, DeltaCache):
                assert (entry.record is not None) == entry.armed == in_round


@given(CANDIDATES, programs())
def test_later_steps_change_no_byte_of_a_snapshot(candidate, steps):
    claim_a_snapshot_stays(candidate, steps)
