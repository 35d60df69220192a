"""Independent rows: a small append is what token by token gives, also where products differ."""

import glob
import os
import subprocess
import sys

import pytest
from independent_rows_on_openblas import NO_DIFFERENCE, claim_an_append_is_token_by_token
from tiny_models import DTYPES, assert_same, drawn_ids, held, run, tiny_model

import qwen35.attention
from qwen35.errors import CacheError

OPENBLAS = sorted(glob.glob("/usr/lib/*/openblas-pthread/libblas.so.3"))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("tokens", [1, 2, 3, 4])
def test_an_append_is_token_by_token(dtype, rows, tokens):
    claim_an_append_is_token_by_token(dtype, rows, tokens, independent_rows=True)


def test_more_than_four_tokens_are_refused_and_change_nothing():
    model = tiny_model()
    cache = model.make_cache()
    run(model, drawn_ids(1, 2), cache)
    before = held(cache)
    with pytest.raises(CacheError, match="5 tokens, at most 4 can be appended"):
        run(model, drawn_ids(1, 5), cache, independent_rows=True)
    assert_same(held(cache), before)


@pytest.mark.parametrize(
    ("seen", "tokens", "first"),
    [
        (1020, 4, 3),
        (1022, 2, 1),
        (1023, 4, None),  # the first token alone is at 1,024 already
        (1019, 4, None),
        (2045, 4, 2),
        (100, 4, None),
        (510, 4, None),  # no change below 1,024
    ],
)
def test_an_append_across_a_change_of_kernels_says_so(seen, tokens, first):
    if first is None:
        return qwen35.forward.check_independent(tokens, seen)
    with pytest.raises(CacheError, match=f"where attention kernels change. Append {first} first"):
        qwen35.forward.check_independent(tokens, seen)
    qwen35.forward.check_independent(first, seen)
    return qwen35.forward.check_independent(tokens - first, seen + first)


def on_openblas(program):
    """Run a part of `independent_rows_on_openblas` with OpenBLAS in place of MLX's BLAS."""
    if sys.platform != "linux" or not OPENBLAS:
        pytest.skip("not run: no OpenBLAS (Debian's libopenblas0-pthread)")
    env = os.environ | {
        "LD_PRELOAD": OPENBLAS[0],
        "OPENBLAS_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    code = f"import independent_rows_on_openblas as part; part.{program}"
    return subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 3])
def test_an_append_is_token_by_token_where_products_depend_on_rows(dtype, rows):
    done = on_openblas(f"claim_an_append_is_token_by_token('{dtype}', {rows}, 4, True)")
    assert done.returncode == 0, done.stderr


def test_so_is_what_a_round_keeps():
    done = on_openblas("claim_a_round_is_token_by_token(True)")
    assert done.returncode == 0, done.stderr


def test_a_replay_of_recorded_inputs_needs_no_independent_rows():
    done = on_openblas("claim_replayed_states_are_those_of_the_recorded_inputs()")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "program",
    [
        "claim_an_append_is_token_by_token('float32', 1, 4, False)",
        "claim_a_round_is_token_by_token(False)",
        "with_flattened_products()",
        "with_attention_in_one()",
    ],
)
def test_there_the_claims_can_fail(program):
    done = on_openblas(program)
    if NO_DIFFERENCE in done.stdout:
        pytest.skip(f"not run: {NO_DIFFERENCE}")
    assert "AssertionError" in done.stderr, done.stderr
