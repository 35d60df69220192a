"""Speed as ratios within one run: compare the rows of each group. Nothing is asserted."""

import mlx.core as mx
import numpy as np
import pytest

from parity import suite
from parity.bits import same_bits_and_finite
from parity.export import Recipe, convert, export
from parity.runners.impl import ImplRunner, record, recorder
from parity.runners.mlx_lm import MlxLmRunner
from parity.trace import Trace
from qwen35.headers import open_checkpoint
from qwen35.load import DTYPES

CONFIG = suite.CHECKPOINTS["heads-0.8b"].text_config | {
    "hidden_size": 256,
    "intermediate_size": 384,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "num_attention_heads": 4,
}
PREFILL = 512


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def models(request, tmp_path_factory):
    """The same converted checkpoint in the implementation and in mlx-lm."""
    folder = tmp_path_factory.mktemp("bench")
    exported = export(Recipe("bench", CONFIG), folder / "transformers", request.param)
    checkpoint = open_checkpoint(convert(exported, folder / "mlx-lm"))
    return {
        "impl": ImplRunner(checkpoint, request.param),
        "mlx-lm": MlxLmRunner(checkpoint, request.param),
    }


@pytest.fixture
def ids():
    return mx.array(np.random.default_rng(0).integers(0, CONFIG["vocab_size"], (1, PREFILL)))


def forward(runner, ids, cache):
    mx.eval(runner.model(ids, cache) if runner.name == "impl" else runner.model(ids, cache=cache))


@pytest.mark.parametrize("name", ["impl", "mlx-lm"])
def test_prefill_512(benchmark, models, ids, name):
    runner = models[name]
    benchmark.group = f"prefill {PREFILL}, {runner.dtype}"
    benchmark.pedantic(
        lambda cache: forward(runner, ids, cache),
        setup=lambda: ((runner.model.make_cache(),), {}),
        rounds=5,
        warmup_rounds=1,
    )


@pytest.mark.parametrize("name", ["impl", "mlx-lm"])
def test_decode(benchmark, models, ids, name):
    runner = models[name]
    benchmark.group = f"decode after {PREFILL}, {runner.dtype}"
    cache = runner.model.make_cache()
    forward(runner, ids, cache)
    benchmark.pedantic(lambda: forward(runner, ids[:, :1], cache), rounds=60, warmup_rounds=3)


@pytest.mark.parametrize("taps", ["no taps", "all taps"])
def test_taps(benchmark, models, ids, taps):
    runner = models["impl"]
    benchmark.group = f"forward of {PREFILL // 4} tokens with and without taps, {runner.dtype}"
    few = ids[:, : PREFILL // 4]

    def tapped(cache):
        taken: dict[str, mx.array] = {}
        runner.model(few, cache, recorder(taken, 0, None, DTYPES[runner.dtype]))
        record(Trace("impl", ()), 0, taken)

    benchmark.pedantic(
        tapped if taps == "all taps" else lambda cache: forward(runner, few, cache),
        setup=lambda: ((runner.model.make_cache(),), {}),
        rounds=9,
        warmup_rounds=1,
    )


BYTES = 1 << 28


@pytest.fixture(scope="module")
def pair_of_arrays():
    values = np.random.default_rng(0).normal(size=BYTES // 4).astype(np.float32)
    return values, values.copy()


@pytest.mark.parametrize("how", ["bit patterns and finiteness", "numpy.array_equal"])
def test_comparison_throughput(benchmark, pair_of_arrays, how):
    benchmark.group = f"comparing {BYTES >> 20} MiB with its copy"
    compare = np.array_equal if how == "numpy.array_equal" else same_bits_and_finite
    benchmark.pedantic(compare, args=pair_of_arrays, rounds=9, warmup_rounds=1)
    benchmark.extra_info["GB/s"] = BYTES / benchmark.stats.stats.median / 1e9
