"""`parity run` as a user calls it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from parity.cli import main


def parity(*arguments, **environment):
    return subprocess.run(
        [sys.executable, "-m", "parity", *map(str, arguments)],
        capture_output=True,
        text=True,
        env=os.environ | environment,
        check=False,
    )


def test_help_imports_no_framework():
    code = (
        "import sys; from parity.cli import main\n"
        "try: main(['run', '--help'])\n"
        "except SystemExit: pass\n"
        "found = {m.split('.')[0] for m in sys.modules}\n"
        "print(sorted(found & {'mlx', 'mlx_lm', 'torch', 'transformers', 'numpy'}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_a_users_own_checkpoint_holds_and_every_report_is_written(checkpoints, tmp_path):
    summary = tmp_path / "summary.md"
    done = parity(
        *("run", "--model", checkpoints.path("tiny", "bfloat16")),
        *("--json", tmp_path / "r.json", "--html", tmp_path / "r.html"),
        *("--junit", tmp_path / "r.xml", "--markdown", tmp_path / "r.md"),
        GITHUB_STEP_SUMMARY=str(summary),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    value = json.loads((tmp_path / "r.json").read_text())
    assert value["verdict"] == "holds"
    assert {pair["failed"] for pair in value["pairs"].values()} == {0}
    assert all(pair["compared"] for pair in value["pairs"].values())
    assert "HOLDS" in done.stdout
    for name in ("r.html", "r.xml", "r.md", "summary.md"):
        assert (tmp_path / name).stat().st_size > 500
    assert [p for p in tmp_path.iterdir() if p.suffix == ".tmp"] == []


def test_a_program_file_is_run_as_written(checkpoints, tmp_path):
    steps = [{"op": "prefill", "ids": [[1, 2, 3, 4]], "chunk": 3}, {"op": "decode", "ids": [[5]]}]
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({"schema": 1, "steps": steps}))
    model = checkpoints.path("tiny", "float32")
    arguments = ["--model", str(model), "--program", str(path), "--json", str(tmp_path / "r.json")]
    assert main(["run", *arguments, "--oracle", "mlx-lm"]) == 0
    (case,) = json.loads((tmp_path / "r.json").read_text())["cases"]
    assert case["program"] == "mine"
    assert case["steps"] == ["prefill tokens 0:3", "prefill tokens 3:4", "decode token 4"]


def test_a_difference_exits_with_1_and_the_command_shows_it_again(monkeypatch, tmp_path):
    import qwen35.delta_net

    real = qwen35.delta_net.normalize_qk
    monkeypatch.setattr(
        qwen35.delta_net, "normalize_qk", lambda q, k, eps: (real(q, k, eps)[0] * 2, k)
    )
    case = ["--case", "tiny-k3/transformers/float32/one-shot", "--oracle", "mlx-lm"]
    assert main(["run", *case, "--seed", "3", "--json", str(tmp_path / "r.json")]) == 1
    value = json.loads((tmp_path / "r.json").read_text())
    first = value["first_divergence"]
    assert (first["tap"], first["attribution"]) == ("layers.0.linear_attn.q", "makes")
    words = first["repeat"].split()
    assert words[:2] == ["parity", "run"]
    assert main([*words[1:], "--json", str(tmp_path / "again.json")]) == 1
    again = json.loads((tmp_path / "again.json").read_text())["first_divergence"]
    assert {**again, "repeat": ""} == {**first, "repeat": ""}


def test_the_json_has_what_bots_read(tmp_path):
    case = ["--case", "tiny-k3/mlx-lm/float16/chunk-2"]
    assert main(["run", *case, "--json", str(tmp_path / "r.json")]) == 0
    value = json.loads((tmp_path / "r.json").read_text())
    assert value["schema"] == 1
    assert value["first_divergence"] is None
    assert value["compared"] == value["pairs"]["mlx-lm"]["identical"] > 0
    assert value["pairs"]["transformers"]["compared"] == 0
    assert value["pairs"]["transformers"]["not_compared"][0]["reason"]
    assert value["repeat"].startswith("parity run --case ")
    assert {"python", "mlx", "mlx-lm", "device", "switches"} <= set(value["environment"])


def test_fail_fast_stops_at_the_first_failing_target(monkeypatch, tmp_path):
    import qwen35.delta_net

    monkeypatch.setattr(qwen35.delta_net, "decay", lambda A_log, a, dt_bias: a * 0)
    arguments = ["--case", "tiny-k3/transformers/*", "--oracle", "mlx-lm", "--fail-fast"]
    assert main(["run", *arguments, "--json", str(tmp_path / "r.json")]) == 1
    cases = json.loads((tmp_path / "r.json").read_text())["cases"]
    assert {case["dtype"] for case in cases} == {"float32"}


ROOT = Path(__file__).parents[2]


def test_ci_runs_the_readmes_test_command_as_written():
    command = "python3.11 -m venv .venv && .venv/bin/pip install nox && .venv/bin/nox -s tests"
    assert command in (ROOT / "README.md").read_text().splitlines()
    assert command in (ROOT / ".ci" / "run").read_text().splitlines()


@pytest.mark.parametrize("session", ["parity", "tests"])
def test_the_workflow_runs_the_same_sessions_on_both_systems(session):
    workflow = (ROOT / ".github" / "workflows" / "parity.yml").read_text()
    assert "[macos-15, ubuntu-22.04]" in workflow
    assert f".venv/bin/nox -s {session}\n" in workflow


ROLLBACK = [
    {"op": "prefill", "ids": [[1, 2, 3], [4, 5, 6]], "lengths": [3, 1]},
    {"op": "verify", "ids": [[7, 8], [9, 10]]},
    {"op": "accept", "keep": [0, 1]},
    {"op": "decode", "ids": [[11], [12]]},
]


def run_steps(checkpoints, tmp_path, steps, *options):
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({"schema": 1, "steps": steps}))
    model = checkpoints.path("tiny", "float32")
    report = tmp_path / "r.json"
    done = parity("run", "--model", model, "--program", path, "--json", report, *options)
    return done, json.loads(report.read_text())


def test_a_stateful_program_is_held_to_append_only_unless_oracles_are_named(checkpoints, tmp_path):
    done, value = run_steps(checkpoints, tmp_path, ROLLBACK)
    assert done.returncode == 0, done.stdout + done.stderr
    assert value["pairs"]["append-only"]["identical"] == value["compared"] > 0
    for other in ("mlx-lm", "transformers"):
        (left_out,) = value["pairs"][other]["not_compared"]
        assert "cannot do" in left_out["reason"]


def test_a_stateful_program_that_no_oracle_can_run_is_no_pass(checkpoints, tmp_path):
    done, value = run_steps(checkpoints, tmp_path, ROLLBACK, "--oracle", "mlx-lm")
    assert (done.returncode, value["verdict"], value["compared"]) == (5, "not-run", 0)


def test_a_round_left_open_is_bad_input(checkpoints, tmp_path):
    done, value = run_steps(checkpoints, tmp_path, ROLLBACK[:2])
    assert (done.returncode, value["verdict"]) == (2, "not-run")
    assert "steps[1] is 'verify' without an accept" in done.stderr
    assert "Traceback" not in done.stderr
