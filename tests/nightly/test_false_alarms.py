"""Clean pairs over many seeds: nothing may be flagged."""

from dataclasses import replace

import pytest

from parity import policy, suite
from parity.run import run

CASES = (
    "tiny/transformers/*/chunk-3",
    "tiny-k3/transformers/*/one-shot",
    "small-qk/transformers/*",
)
SHORT = 2  # programs a checkpoint


def with_short_programs(target, seed):
    vocabulary = target.checkpoint.config["text_config"]["vocab_size"]
    short = suite.short_programs(vocabulary, seed, SHORT)
    return replace(target, programs=target.programs | short)


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(200))
def test_no_comparison_of_a_clean_pair_fails(seed, tmp_path):
    names = suite.selected(CASES, suite.DTYPES)
    targets = suite.targets(tmp_path, names, seed, "parity run")
    drawn = (with_short_programs(target, seed) for target in targets)
    result = run(drawn, "impl", ["mlx-lm", "transformers"], policy.load())
    compared = [c for case in result.cases for p in case.pairs.values() for c in p.comparisons]
    short = [case for case in result.cases if case.program_name.startswith("short-")]
    assert len(short) == SHORT * len(names)  # a checkpoint and dtype have one case here
    assert len(compared) > 10_000
    flagged = [
        f"{case.name} {oracle} step {c.forward} {c.tap} {c.verdict}: {c.detail}"
        for case in result.cases
        for oracle, pair in case.pairs.items()
        for c in pair.comparisons
        if c.failed
    ]
    assert flagged == []
