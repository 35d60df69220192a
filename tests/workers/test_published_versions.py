"""Published versions of mlx-lm, unmodified, each with the mlx of its time."""

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import name_maps

from parity import policy, safetensors_file, taps
from parity.commands.worker_options import cache_folder
from parity.result import to_json
from parity.run import run
from parity.runners.base import RunnerOptions
from parity.runners.mlx_arrays import to_numpy
from parity.runners.registry import open_runner
from parity.runners.worker import Workers
from qwen35.errors import CannotRunError
from qwen35.plan import make_plan

pytestmark = pytest.mark.workers

DTYPES = ("float32", "float16", "bfloat16")
HEAD = "language_model.lm_head.weight"


@pytest.fixture(scope="module")
def workers():
    """One process a version for all tests; the environments are kept for the next session."""
    with Workers(cache_folder(None), timeout=600, say=print) as workers:
        yield workers


@pytest.fixture
def judge(checkpoints, workers):
    def judged(case, oracle, semantics="mlx-lm-0.32", candidate="impl"):
        options = RunnerOptions(semantics, workers)
        target = checkpoints.target(*case)
        result = run([target], candidate, [oracle], policy.load(), options=options)
        return to_json(result, "parity run", 0)

    return judged


def holds(value):
    (pair,) = value["pairs"].values()
    return pair["identical"] == pair["compared"] > 0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", [("tiny", "chunk-3"), ("small-qk", "one-shot")])
@pytest.mark.parametrize("generation", ["transformers", "mlx-lm"])
def test_the_0_31_preset_is_0_31_3_bit_for_bit_on_every_tap(judge, case, dtype, generation):
    label, program = case
    value = judge((label, dtype, program, generation), "mlx-lm==0.31.3", "mlx-lm-0.31")
    assert holds(value), value["first_divergence"]
    assert value["environment"]["runners"]["mlx-lm==0.31.3"]["mlx"] == "0.31.2"


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_0_32_preset_first_differs_from_0_31_3_where_q_is_normalized(judge, dtype):
    value = judge(("small-qk", dtype, "one-shot"), "mlx-lm==0.31.3")
    first = value["first_divergence"]
    assert (first["step"], first["tap"]) == (0, "layers.0.linear_attn.q")
    assert first["attribution"] == "makes"


@pytest.mark.parametrize("dtype", DTYPES)
def test_0_32_0_and_the_0_32_preset_agree(judge, dtype):
    value = judge(("small-qk", dtype, "one-shot"), "mlx-lm==0.32.0")
    assert holds(value), value["first_divergence"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_current_version_in_its_own_environment_is_the_one_in_this_process(judge, dtype):
    value = judge(("tiny", dtype, "chunk-3"), "mlx-lm==0.32.2", candidate="mlx-lm")
    assert holds(value), value["first_divergence"]


@pytest.mark.parametrize("version", ["0.30.7", "0.31.1", "0.31.2", "0.31.3", "0.32.0", "0.32.2"])
def test_every_tap_is_seen_in_every_version(checkpoints, workers, version):
    target = checkpoints.target("tiny", "bfloat16", "chunk-3")
    (program,) = target.programs.values()
    options = RunnerOptions(workers=workers)
    runner = open_runner(f"mlx-lm=={version}", target.checkpoint, target.dtype, options)
    trace = runner.run(program)
    forwards = range(len(program.forwards()))
    assert set(trace.tensors) == {(f, n) for f in forwards for n in taps.order(trace.layer_types)}


def test_a_decay_rounded_to_bf16_is_found_in_0_31_1(judge):
    value = judge(("tiny", "bfloat16", "chunk-3"), "mlx-lm==0.31.1", "mlx-lm-0.31")
    first = value["first_divergence"]
    assert (first["tap"], first["verdict"]) == ("layers.0.linear_attn.g", "dtype")


def test_an_output_promoted_to_f32_is_found_in_0_30_7(judge):
    value = judge(("tiny", "bfloat16", "chunk-3"), "mlx-lm==0.30.7", "mlx-lm-0.31")
    first = value["first_divergence"]
    assert (first["tap"], first["verdict"]) == ("layers.0.linear_attn.y", "dtype")


def test_a_version_without_this_model_is_said_to_be_one(judge):
    with pytest.raises(CannotRunError, match=r"mlx-lm 0\.30\.2 has no Qwen3\.5 model"):
        judge(("tiny", "float32", "chunk-3"), "mlx-lm==0.30.2")


def test_a_checkpoint_that_kept_its_draft_head_is_shifted_twice_by_0_31_3_alone(
    checkpoints, workers, tmp_path
):
    import json
    import shutil

    from parity.run import Target
    from qwen35.headers import open_checkpoint

    target = checkpoints.target("tiny", "bfloat16", "chunk-3", "mlx-lm")
    folder = shutil.copytree(target.checkpoint.path, tmp_path / "kept")
    index = folder / "model.safetensors.index.json"
    draft = "mtp.norm.weight"
    safetensors_file.write(folder / "model-mtp.safetensors", {draft: np.zeros(44, np.float32)})
    if index.exists():
        named = json.loads(index.read_text())
        named["weight_map"][draft] = "model-mtp.safetensors"
        index.write_text(json.dumps(named))
    kept = Target("kept", open_checkpoint(folder), "mlx-lm", "bfloat16", target.programs, "")

    def first(semantics):
        options = RunnerOptions(semantics, workers)
        result = run([kept], "impl", ["mlx-lm==0.31.3"], policy.load(), options=options)
        return to_json(result, "", 0)

    value = first("mlx-lm-0.32")["first_divergence"]
    assert (value["tap"], value["attribution"]) == ("layers.0.input_layernorm", "makes")
    assert holds(first("mlx-lm-0.31"))


def sanitized(workers, version, shapes, values, tied, folder):
    """Return name -> value as that version's own sanitize leaves them, in its order."""
    arrays = {f"0.{name}": value for name, value in values.items()}
    safetensors_file.write(folder / "in", arrays)
    answer = workers.get(f"mlx-lm=={version}").ask(
        ("names",),
        op="sanitize",
        values=str(folder / "in"),
        out=str(folder / "out"),
        maps=[{"tied": tied, "names": list(values)}],
    )
    results = safetensors_file.read(folder / "out")
    (names,) = answer["names"]
    return {name: results[f"0.{name}"] for name in names}


@pytest.mark.parametrize(
    ("version", "rule"), [("0.31.3", "mlx-lm-0.31"), ("0.32.0", "mlx-lm-0.32")]
)
def test_the_plans_rule_is_that_versions_own_sanitize(workers, tmp_path_factory, version, rule):
    folder = tmp_path_factory.mktemp("sanitize")
    shifted = []

    @settings(deadline=None, max_examples=300)
    @given(shapes=name_maps(), dtype=st.sampled_from(DTYPES), tied=st.booleans())
    def held(shapes, dtype, tied):
        weights = {
            name: mx.array(
                np.random.default_rng(len(name)).normal(0, 0.3, shape), getattr(mx, dtype)
            )
            for name, shape in shapes.items()
        }
        values = {name: to_numpy(value) for name, value in weights.items()}
        theirs = sanitized(workers, version, shapes, values, tied, folder)
        if tied:  # renamed before it is looked for, so mlx-lm keeps it and then refuses to load
            theirs.pop(HEAD, None)
        plan = make_plan(shapes, tied, rule)
        shifted.append(plan.shift)
        assert [entry.target for entry in plan.entries] == list(theirs)
        for entry in plan.entries:
            value = weights[entry.source]
            value = value.moveaxis(2, 1) if entry.move_conv else value
            ours = to_numpy(mx.contiguous(value + 1.0 if entry.add_one else value))
            due = theirs[entry.target]
            assert (ours.dtype, ours.shape) == (due.dtype, due.shape)
            assert ours.tobytes() == due.tobytes()

    held()
    assert len(shifted) >= 300
    assert set(shifted) == {True, False}


def test_without_a_network_pips_reason_is_passed_on(tmp_path, monkeypatch):
    for name, value in {
        "PIP_CONFIG_FILE": "/dev/null",
        "PIP_INDEX_URL": "http://127.0.0.1:9/simple",
        "PIP_RETRIES": "0",
        "PIP_FIND_LINKS": "",
        "PIP_EXTRA_INDEX_URL": "",
    }.items():
        monkeypatch.setenv(name, value)
    with Workers(tmp_path) as fresh, pytest.raises(CannotRunError) as caught:
        fresh.get("mlx-lm==0.31.3")
    assert "cannot be built: pip ended with 1" in str(caught.value)
    assert "No matching distribution found for mlx-lm==0.31.3" in str(caught.value)
