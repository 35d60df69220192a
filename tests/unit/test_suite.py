"""What the suite's programs reach."""

from parity import suite
from qwen35.cache import KVCache


def test_short_programs_have_one_row_and_every_length_comes_up():
    drawn = [p for seed in range(100) for p in suite.short_programs(131, seed).values()]
    lengths = {(p.steps[0].ids.shape[1], len(p.steps) - 1) for p in drawn}
    assert lengths == {(tokens, decodes) for tokens in (1, 2, 3) for decodes in (0, 1, 2)}
    assert {p.rows for p in drawn} == {1}


def test_a_cache_of_keys_grows_at_a_decode_and_within_a_chunk():
    grows = set()
    for plan in suite.CHECKPOINTS.values():
        for name in plan.programs:
            seen = 0
            for _, op, ids in suite.program(plan, name, 0).forwards():
                before, seen = seen, seen + ids.shape[1]
                if before and before <= KVCache.block < seen:
                    grows.add((op, before < KVCache.block))
    assert {("decode", False), ("prefill", True)} <= grows
