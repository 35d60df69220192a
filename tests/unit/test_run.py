"""How a run is put together: what is compared, what is not, and who is loaded."""

import numpy as np
import pytest

from parity import policy
from parity.result import exit_code, not_run, to_json
from parity.run import run
from qwen35.errors import InputError


def test_a_checkpoint_an_oracle_cannot_load_is_not_compared_and_never_passed(checkpoints):
    value = checkpoints.judge(
        "tiny", "float32", "one-shot", oracles=("mlx-lm", "transformers"), generation="mlx-lm"
    )
    assert value["pairs"]["mlx-lm"]["compared"] == value["compared"] > 0
    assert value["pairs"]["transformers"]["compared"] == 0
    (left_out,) = value["pairs"]["transformers"]["not_compared"]
    assert "mlx-lm's layout" in left_out["reason"]


def test_nothing_compared_is_not_run_and_exits_with_5(checkpoints):
    value = checkpoints.judge(
        "tiny", "float32", "one-shot", oracles=("transformers",), generation="mlx-lm"
    )
    assert (value["verdict"], exit_code(value)) == ("not-run", 5)
    assert exit_code(not_run("parity run", "why")) == 5


def test_a_pair_without_a_rule_is_not_compared(checkpoints, tmp_path):
    path = tmp_path / "policy.toml"
    text = policy.DEFAULT.read_text().replace('dtypes = ["float32"', 'dtypes = ["float16"')
    path.write_text(text)
    target = checkpoints.target("tiny", "float32", "one-shot")
    value = to_json(run([target], "impl", ["mlx-lm"], policy.load(path)), "", 0)
    assert value["verdict"] == "not-run"
    assert (
        "has no rule for impl against mlx-lm"
        in value["pairs"]["mlx-lm"]["not_compared"][0]["reason"]
    )


def test_a_runner_may_be_named_once(checkpoints):
    target = checkpoints.target("tiny", "float32", "one-shot")
    with pytest.raises(InputError, match="each runner may appear once"):
        run([target], "impl", ["mlx-lm", "mlx-lm"], policy.load())


def test_mlx_lm_as_candidate_is_judged_by_transformers(checkpoints):
    target = checkpoints.target("tiny-k3", "float32", "one-shot")
    value = to_json(run([target], "mlx-lm", ["transformers"], policy.load()), "", 0)
    assert value["verdict"] == "holds"
    assert value["pairs"]["transformers"]["within"] > 0


def test_the_totals_are_the_sums_of_the_cells(checkpoints):
    value = checkpoints.judge("tiny", "float32", "chunk-2", oracles=("mlx-lm", "transformers"))
    cells = [c for p in value["cases"][0]["pairs"].values() for c in p["cells"]]
    assert value["compared"] == sum(cell["compared"] for cell in cells)


def test_both_generations_are_one_model_bit_for_bit(checkpoints):
    from parity.runners.impl import ImplRunner

    traces = []
    for generation in ("transformers", "mlx-lm"):
        target = checkpoints.target("tiny", "bfloat16", "one-shot", generation=generation)
        runner = ImplRunner(target.checkpoint, "bfloat16")
        traces.append(runner.run(target.programs["one-shot"]).tensors)
    assert traces[0].keys() == traces[1].keys()
    for key, value in traces[0].items():
        assert np.array_equal(value, traces[1][key]), key


def test_presets_differ_where_mlx_lm_changed(checkpoints):
    from parity.compare import compare
    from parity.runners.impl import ImplRunner
    from qwen35.semantics import PRESETS

    target = checkpoints.target("small-qk", "float32", "one-shot")
    program = target.programs["one-shot"]
    old, new = (
        ImplRunner(target.checkpoint, "float32", PRESETS[name]).run(program)
        for name in ("mlx-lm-0.31", "mlx-lm-0.32")
    )
    pair = policy.load().pair("impl", "mlx-lm", "float32")
    results = compare(old, new, pair, old.layer_types, len(program.forwards()), "float32")
    first = next(c for c in results if c.failed)
    assert first.tap == "layers.0.linear_attn.q"
    assert first.candidate_to_oracle > 0.1
