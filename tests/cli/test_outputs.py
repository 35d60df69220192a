"""The files that `parity run` and `parity inspect` write, and those that they must not."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from report_samples import differing
from safetensors.numpy import load_file, save_file

import parity_reports.html
import parity_reports.terminal
from parity.cli import main
from parity.commands.invocation import command_line
from qwen35.errors import InputError

WRITE = sys.modules["parity_reports.write"]
REPORTS = ("--json", "--html", "--junit", "--markdown")


@pytest.fixture
def runs(monkeypatch):
    """Call `parity run` where every run differs, without running anything."""
    monkeypatch.setattr("parity.run.run", lambda *args: None)
    monkeypatch.setattr("parity.result.to_json", lambda *args: differing())
    return lambda *arguments: main(["run", *map(str, arguments)])


@pytest.fixture
def model(checkpoints, tmp_path):
    """A copy of a small checkpoint, and beside it what else a run reads."""
    (tmp_path / "program.json").write_text('{"schema": 1, "steps": [{"op": "x"}]}')
    (tmp_path / "policy.toml").write_text("schema = 2")
    return shutil.copytree(checkpoints.path("tiny", "float32"), tmp_path / "model")


def verdict(path):
    return json.loads(path.read_text())["verdict"]


def full_disk(monkeypatch, *names):
    """Let writes to files of these names fail, once the work is done."""

    def failing(write):
        def wrapped(path, text):
            if path.name in names:
                raise InputError(f"{path}: cannot be written (No space left on device).")
            write(path, text)

        return wrapped

    for name in ("replace", "add_to"):
        monkeypatch.setattr(WRITE, name, failing(getattr(WRITE, name)))


# A verdict, once computed.


@pytest.mark.parametrize("option", [*REPORTS[1:], "$GITHUB_STEP_SUMMARY"])
def test_a_report_that_cannot_be_written_leaves_the_verdict(
    runs, monkeypatch, capsys, tmp_path, option
):
    full_disk(monkeypatch, "report")
    arguments = [option, tmp_path / "report"]
    if option == "$GITHUB_STEP_SUMMARY":
        monkeypatch.setenv(option[1:], str(tmp_path / "report"))
        arguments = []
    assert runs("--json", tmp_path / "r.json", *arguments, "--seed", "1") == 3
    assert verdict(tmp_path / "r.json") == "differs"
    printed = capsys.readouterr()
    assert f"{option} {tmp_path / 'report'}: cannot be written" in printed.err
    assert "The verdict is differs." in printed.err
    assert "DIFFERS" in printed.out


def test_a_terminal_that_cannot_be_written_leaves_the_verdict(runs, monkeypatch, capfd, tmp_path):
    def fail(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(parity_reports.terminal, "render", fail)
    monkeypatch.setattr(os, "dup2", lambda *args: None)
    assert runs("--json", tmp_path / "r.json") == 3
    assert verdict(tmp_path / "r.json") == "differs"
    assert "standard output: cannot be written (No space left" in capfd.readouterr().err


@pytest.mark.parametrize("fault", [KeyError, KeyboardInterrupt])
def test_a_fault_or_an_interrupt_in_a_report_leaves_the_verdict(runs, monkeypatch, tmp_path, fault):
    def fail(*args):
        raise fault

    monkeypatch.setattr(parity_reports.html, "render", fail)
    assert runs("--json", tmp_path / "r.json", "--html", tmp_path / "r.html") == 3
    assert verdict(tmp_path / "r.json") == "differs"


def test_a_json_that_cannot_be_written_leaves_no_older_verdict(runs, monkeypatch, capsys, tmp_path):
    full_disk(monkeypatch, "r.json")
    (tmp_path / "r.json").write_text('{"verdict": "holds"}')
    assert runs("--json", tmp_path / "r.json", "--html", tmp_path / "r.html") == 3
    assert sorted(p.name for p in tmp_path.iterdir()) == ["r.html"]
    assert "The verdict is differs." in capsys.readouterr().err


# Before the run.


@pytest.mark.parametrize("option", [*REPORTS, "$GITHUB_STEP_SUMMARY"])
@pytest.mark.parametrize(
    ("name", "said"),
    [("none/r", "there is no folder"), ("folder", "Is a directory"), ("shut", "Permission denied")],
)
def test_what_cannot_be_written_is_refused_before_the_run(
    monkeypatch, capsys, tmp_path, option, name, said
):
    (tmp_path / "folder").mkdir()
    if name == "shut":

        def fail(*args, **options):
            raise PermissionError(13, "Permission denied")

        monkeypatch.setattr(Path, "touch", fail)
    monkeypatch.setattr("parity.run.run", lambda *args: pytest.fail("it ran"))
    arguments = [option, str(tmp_path / name)]
    if option == "$GITHUB_STEP_SUMMARY":
        monkeypatch.setenv(option[1:], arguments[1])
        arguments = []
    assert main(["run", *arguments]) == 2
    error = capsys.readouterr().err
    assert f"parity: {option} {tmp_path / name}: cannot be written" in error
    assert said in error
    assert [p.name for p in tmp_path.iterdir()] == ["folder"]


# What must not be overwritten.


@pytest.mark.parametrize("option", REPORTS)
@pytest.mark.parametrize(
    "name",
    ["model/config.json", "model/new.json", "program.json", "policy.toml", "link", "elsewhere"],
)
def test_an_input_is_not_overwritten(capsys, model, tmp_path, option, name):
    (tmp_path / "link").symlink_to(model / "config.json")
    # As in the hub's cache, whose checkpoints are links to files kept elsewhere.
    (tmp_path / "elsewhere").write_text("{}")
    (model / "extra.json").symlink_to(tmp_path / "elsewhere")
    before = {p: p.read_bytes() for p in sorted(tmp_path.rglob("*")) if p.is_file()}
    inputs = {"model": model, "program": "program.json", "policy": "policy.toml"}
    words = [f"--{kind}={tmp_path / path}" for kind, path in inputs.items()]
    assert main(["run", *words, option, str(tmp_path / name)]) == 2
    assert f"{option} {tmp_path / name}: is an input" in capsys.readouterr().err
    assert {p: p.read_bytes() for p in sorted(tmp_path.rglob("*")) if p.is_file()} == before


def test_inspect_does_not_overwrite_its_model(capsys, model):
    before = (model / "config.json").read_bytes()
    assert main(["inspect", str(model), "--json", str(model / "config.json")]) == 2
    assert "is an input" in capsys.readouterr().err
    assert (model / "config.json").read_bytes() == before


@pytest.mark.parametrize("exists", [True, False])
@pytest.mark.parametrize("option", REPORTS)
def test_a_link_is_written_through(runs, tmp_path, option, exists):
    (tmp_path / "kept").mkdir()
    if exists:
        (tmp_path / "kept" / "r").write_text("old")
    (tmp_path / "link").symlink_to("kept/r")
    assert runs(option, tmp_path / "link") == 1
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "kept" / "r").stat().st_size > 500


def test_inspect_writes_through_a_link(model, tmp_path):
    (tmp_path / "link").symlink_to("r.json")
    assert main(["inspect", str(model), "--json", str(tmp_path / "link")]) == 0
    assert (tmp_path / "link").is_symlink()
    assert verdict(tmp_path / "r.json") == "holds"


# A command that cannot be parsed.


@pytest.mark.parametrize(
    "words",
    [
        ("run", "--seed", "x"),
        ("run", "--bogus"),
        ("run", "--device", "tpu"),
        ("run", "--model"),
        ("run", "--seed", "x", "--help"),
        ("inspect",),
        ("inspect", "model", "--rule", "none"),
    ],
)
@pytest.mark.parametrize("older", ['{"schema": 1, "verdict": "holds"}', "", None])
def test_a_usage_error_leaves_no_older_verdict(capsys, tmp_path, words, older):
    path = tmp_path / "r.json"
    if older is not None:
        path.write_text(older)
    with pytest.raises(SystemExit) as stop:
        main([*words, "--json", str(path)])
    assert stop.value.code == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    value = json.loads(path.read_text())
    assert value["verdict"] == "not-run"
    assert f"error: {value['error']}" in printed.err


@pytest.mark.parametrize(
    "words", [("run", "--modle", "model", "--json"), ("inspect", "--rule", "none", "--json")]
)
def test_a_usage_error_overwrites_nothing_but_a_result(model, words):
    path = model / "config.json"
    before = path.read_bytes()
    with pytest.raises(SystemExit):
        main([*words, str(path)])
    assert path.read_bytes() == before


# What is said.


def test_weights_that_are_no_numbers_are_nonfinite_and_nothing_is_warned_of(model, tmp_path):
    tensors = load_file(model / "model.safetensors")
    name = next(n for n in tensors if n.endswith("layers.0.mlp.gate_proj.weight"))
    tensors[name] = tensors[name] * np.float32("nan")
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    command = [sys.executable, "-m", "parity", "run", "--model", model, "--json", tmp_path / "r"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "")
    value = json.loads((tmp_path / "r").read_text())
    assert value["first_divergence"]["verdict"] == "nonfinite"
    assert {pair["failed"] > 0 for pair in value["pairs"].values()} == {True}


def test_config_keys_that_nothing_reads_are_reported(capsys, model, tmp_path):
    config = json.loads((model / "config.json").read_text())
    config["text_config"]["colour"] = "red"
    (model / "config.json").write_text(json.dumps(config))
    path = tmp_path / "r.json"
    keys = ["text_config.colour"]
    assert main(["run", "--model", str(model), "--oracle", "mlx-lm", "--json", str(path)]) == 0
    assert "nothing here reads text_config.colour" in capsys.readouterr().out
    assert json.loads(path.read_text())["unknown_config_keys"] == {"model/transformers": keys}
    assert main(["inspect", str(model), "--json", str(path)]) == 0
    assert "nothing here reads: text_config.colour" in capsys.readouterr().out
    assert json.loads(path.read_text())["unknown_config_keys"] == keys


@pytest.mark.parametrize(
    ("typed", "on_path", "due"),
    [
        ("/x/bin/parity", "/x/bin/parity", "parity"),
        (".nox/parity/bin/parity", "/x/bin/parity", ".nox/parity/bin/parity"),
        ("/my env/bin/parity", None, "'/my env/bin/parity'"),
        ("/x/parity/__main__.py", None, "parity"),
    ],
)
def test_the_repeat_command_is_what_was_typed(monkeypatch, typed, on_path, due):
    monkeypatch.setattr(sys, "argv", [typed])
    monkeypatch.setattr(shutil, "which", lambda name: on_path)
    assert command_line(["run", "--case", "x/*"]) == f"{due} run --case 'x/*'"


def test_a_reader_that_has_seen_enough_changes_no_verdict():
    code = (
        "import os; read, write = os.pipe(); os.close(read); os.dup2(write, 1)\n"
        "from report_samples import holding\n"
        "from parity.commands.run import _print\n"
        "raise SystemExit(f'said {_print(holding())}')"
    )
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
    assert done.stderr == "said None\n"
