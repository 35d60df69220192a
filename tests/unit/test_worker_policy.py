"""A policy's runner names are patterns, so that one pair covers every published version."""

import pytest

from parity import policy

SHIPPED = policy.load()


@pytest.mark.parametrize("oracle", ["mlx-lm==0.31.3", "mlx-lm@/some/copy [1]"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_workers_of_mlx_lm_are_held_to_what_mlx_lm_is(oracle, dtype):
    due = SHIPPED.pair("impl", "mlx-lm", dtype)
    assert SHIPPED.pair("impl", oracle, dtype) is due
    assert SHIPPED.pair("mlx-lm", oracle, dtype) is due
    assert SHIPPED.pair(oracle, "transformers", dtype) is SHIPPED.pair(
        "impl", "transformers", dtype
    )


def test_a_name_is_no_pattern_and_no_prefix_of_one():
    assert SHIPPED.pair("impl", "mlx-lm0.31.3", "float32") is None
    assert SHIPPED.pair("*", "mlx-lm", "float32") is None
