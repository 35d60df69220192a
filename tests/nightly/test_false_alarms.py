"""Clean pairs over many seeds: nothing may be flagged."""

import pytest

from parity import policy, suite
from parity.run import run

CASES = (
    "tiny/transformers/*/chunk-3",
    "tiny-k3/transformers/*/one-shot",
    "small-qk/transformers/*",
)


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(200))
def test_no_comparison_of_a_clean_pair_fails(seed, tmp_path):
    names = suite.selected(CASES, suite.DTYPES)
    targets = suite.targets(tmp_path, names, seed, "parity run")
    result = run(targets, "impl", ["mlx-lm", "transformers"], policy.load())
    compared = [c for case in result.cases for p in case.pairs.values() for c in p.comparisons]
    assert len(compared) > 10_000
    assert [c for c in compared if c.failed] == []
