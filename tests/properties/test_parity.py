"""Properties over drawn models and programs: equality that is promised bit for bit."""

import tempfile
from pathlib import Path

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from parity import policy, suite
from parity.bits import same_bits_and_finite
from parity.compare import compare
from parity.export import Recipe, convert, export
from parity.program import Program
from parity.runners.impl import ImplRunner
from parity.runners.mlx_lm import MlxLmRunner
from parity.steps import Step
from qwen35.headers import open_checkpoint


@st.composite
def configs(draw):
    """Draw a small text config in which no two of the dimensions that could be confused agree."""
    kv_heads, key_heads = draw(st.permutations([1, 2, 3, 5]))[:2]
    sizes = draw(st.permutations([8, 16, 24]))
    layers, interval = draw(st.sampled_from([(2, 2), (3, 2), (4, 4), (5, 3)]))
    return suite.CHECKPOINTS["tiny"].text_config | {
        "hidden_size": draw(st.sampled_from([20, 28, 36])),
        "intermediate_size": draw(st.sampled_from([26, 34, 42])),
        "num_hidden_layers": layers,
        "full_attention_interval": interval,
        "num_key_value_heads": kv_heads,
        "num_attention_heads": kv_heads * draw(st.sampled_from([1, 2, 3])),
        "head_dim": sizes[0],
        "linear_num_key_heads": key_heads,
        "linear_num_value_heads": key_heads * draw(st.sampled_from([1, 2, 3])),
        "linear_key_head_dim": sizes[1],
        "linear_value_head_dim": sizes[2],
        "linear_conv_kernel_dim": draw(st.integers(2, 5)),
        "vocab_size": 53,
        "tie_word_embeddings": draw(st.booleans()),
        "attention_bias": draw(st.booleans()),
    }


@st.composite
def programs(draw, least_rows=1):
    """Draw a program: a prompt in one or several prefills, with chunks, and decodes."""
    height, width = draw(st.integers(least_rows, 3)), draw(st.integers(2, 12))
    ids = draw(
        st.lists(
            st.lists(st.integers(0, 52), min_size=width, max_size=width),
            min_size=height,
            max_size=height,
        )
    )
    cuts = draw(partitions(width))
    steps, at = [], 0
    for size in cuts:
        part = np.array(ids)[:, at : at + size]
        op = "decode" if size == 1 and at and draw(st.booleans()) else "prefill"
        chunk = draw(st.none() | st.integers(1, size)) if op == "prefill" else None
        steps.append(Step(op, part, chunk))
        at += size
    return Program(tuple(steps))


@st.composite
def partitions(draw, total):
    """Draw positive sizes that add up to `total`."""
    sizes = []
    while sum(sizes) < total:
        sizes.append(draw(st.integers(1, total - sum(sizes))))
    return sizes


@given(config=configs(), program=programs(), dtype=st.sampled_from(suite.DTYPES), data=st.data())
def test_the_implementation_is_mlx_lm_bit_for_bit(config, program, dtype, data):
    with tempfile.TemporaryDirectory() as folder:
        path = export(Recipe("drawn", config), Path(folder) / "a", dtype)
        if data.draw(st.booleans(), label="converted"):
            path = convert(path, Path(folder) / "b")
        checkpoint = open_checkpoint(path)
        ours = ImplRunner(checkpoint, dtype).run(program)
        theirs = MlxLmRunner(checkpoint, dtype).run(program)
    pair = policy.load().pair("impl", "mlx-lm", dtype)
    forwards = len(program.forwards())
    results = compare(ours, theirs, pair, ours.layer_types, forwards, dtype)
    assert results
    assert [c for c in results if c.failed] == []


STATES = ("conv_tail", "recurrent_state", "keys", "values", "offset")


def last_states(trace):
    last = max(forward for forward, _ in trace.tensors)
    states = {n: v for (f, n), v in trace.tensors.items() if f == last and n.endswith(STATES)}
    return states | {"logits": trace.tensors[last, "logits"][:, -1:]}


def assert_same(left, right):
    assert left.keys() == right.keys()
    for name in left:
        assert left[name].shape == right[name].shape, name
        assert same_bits_and_finite(left[name], right[name]) == (True, True), name


@given(program=programs(), dtype=st.sampled_from(suite.DTYPES))
def test_how_a_prompt_is_cut_does_not_change_states_or_the_last_logits(checkpoints, program, dtype):
    runner = ImplRunner(open_checkpoint(checkpoints.path("tiny", dtype)), dtype)
    whole = Program((Step("prefill", np.concatenate([s.ids for s in program.steps], axis=1)),))
    assert_same(last_states(runner.run(program)), last_states(runner.run(whole)))


@given(program=programs(least_rows=2), dtype=st.sampled_from(suite.DTYPES))
def test_a_row_of_a_batch_is_that_row_alone(checkpoints, program, dtype):
    runner = ImplRunner(open_checkpoint(checkpoints.path("tiny", dtype)), dtype)
    batch = runner.run(program)
    for row in range(program.rows):
        steps = tuple(Step(s.op, s.ids[row : row + 1], s.chunk) for s in program.steps)
        alone = runner.run(Program(steps))
        assert_same(
            {str(key): value[row : row + 1] for key, value in batch.tensors.items()},
            {str(key): value for key, value in alone.tensors.items()},
        )
