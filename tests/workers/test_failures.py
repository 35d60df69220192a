"""Whatever a worker does, the answer is one clear error, and nothing of it stays."""

import json
import os
import tempfile
import textwrap
import time

import pytest
from workers.edited import edited_copy

from parity.cli import main
from parity.runners.worker import Worker, WorkerRunner, Workers
from qwen35.errors import CannotRunError, InputError

FAKE = """
import json, os, signal, subprocess, sys, time
def answer(**value):
    print(json.dumps(value), flush=True)
def request():
    return json.loads(sys.stdin.readline())
def hello(**changes):
    file = os.path.join(json.loads(sys.argv[1])["mlx_lm"], "mlx_lm", "__init__.py")
    known = dict(ok=True, protocol=1, mlx_lm="0", mlx="0", python="3", file=file)
    answer(**known | changes)
def load():
    hello()
    request()
    answer(ok=True, layer_types=["linear_attention", "full_attention"] * 2)
    return request()
"""


@pytest.fixture
def name(tmp_path):
    """The name of a runner whose package is there, and is never imported."""
    package = tmp_path / "copy" / "mlx_lm"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    return f"mlx-lm@{package.parent}"


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """Let workers run this script instead."""

    def become(script):
        path = tmp_path / "fake.py"
        path.write_text(FAKE + textwrap.dedent(script))
        monkeypatch.setattr(Worker, "script", path)

    return become


def is_alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rsplit(") ", 1)[1][0] != "Z"
    except FileNotFoundError:
        return False
    except NotADirectoryError:
        os.kill(pid, 0)
        return True


STARTS = {
    "print('last words', file=sys.stderr); sys.stderr.flush(); os.kill(os.getpid(), 11)": (
        "the worker was killed by SIGSEGV.\n  It said last:\n    last words"
    ),
    "sys.exit(7)": "the worker ended with 7.",
    "os._exit(0)": "the worker ended with 0.",
    "print('hello')": r"answered b'hello\n', a line of JSON is due.",
    "print('[1]')": r"answered b'[1]\n', a line of JSON is due.",
    "os.write(1, bytes(range(256)) + b'\\n')": "a line of JSON is due",
    "answer(ok=True)": "answered without mlx_lm, file, mlx, python.",
    "hello(protocol=2)": "speaks protocol 2.",
    "hello(file='/elsewhere/mlx_lm/__init__.py')": "imported /elsewhere/mlx_lm/__init__.py, which",
    "answer(error='ImportError: no such thing', kind='failed')": ": ImportError: no such thing",
}


@pytest.mark.parametrize("script", STARTS)
def test_a_worker_that_does_not_start_is_a_clear_error(fake, name, script):
    fake(script)
    with Workers(timeout=30) as workers, pytest.raises(CannotRunError) as caught:
        workers.get(name)
    assert str(caught.value).startswith(f"{name}: ")
    assert STARTS[script] in str(caught.value)
    assert "Traceback" not in str(caught.value)


def test_a_hanging_worker_is_stopped_with_all_it_started(fake, name, tmp_path):
    fake(f"""
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        with open({str(tmp_path / "pids")!r}, "w") as file:
            file.write(json.dumps([os.getpid(), child.pid]))
        time.sleep(60)
    """)
    started = time.monotonic()
    with (
        Workers(timeout=1.5) as workers,
        pytest.raises(CannotRunError, match=r"no answer in 1\.5 s"),
    ):
        workers.get(name)
    assert time.monotonic() - started < 20
    pids = json.loads((tmp_path / "pids").read_text())
    deadline = time.monotonic() + 5
    while any(map(is_alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(is_alive, pids))


RUNS = {
    "load(); os.kill(os.getpid(), 9)": "was killed by SIGKILL",
    "load(); answer(ok=True)": "answered without info, forwards",
    "load(); answer(ok=True, info={}, forwards=[0])": "wrote no readable tensors",
    "load(); answer(ok=True, info={}, forwards=['../x'])": "wrote no readable tensors",
    "open(load()['out'] + '/0.safetensors', 'w').write('x' * 99)\n"
    "answer(ok=True, info={}, forwards=[0])": "wrote no readable tensors",
    "hello(); answer(ok=True, layer_types=[])": "loaded layers []",
}


@pytest.mark.parametrize("script", RUNS)
def test_a_worker_that_fails_in_a_run_leaves_no_files(
    checkpoints, fake, name, script, tmp_path, monkeypatch
):
    target = checkpoints.target("tiny-k3", "float32", "chunk-2")
    (program,) = target.programs.values()
    place = tmp_path / "temporary"
    place.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    fake(script)
    with Workers(timeout=30) as workers, pytest.raises(CannotRunError) as caught:
        WorkerRunner(name, target.checkpoint, target.dtype, workers).run(program)
    assert RUNS[script] in str(caught.value)
    assert list(place.iterdir()) == []


def test_what_the_worker_refuses_as_input_is_refused_here(checkpoints, fake, name):
    fake("hello(); request(); answer(error='model: is damaged. Mend it.', kind='input')")
    target = checkpoints.target("tiny-k3", "float32", "chunk-2")
    with Workers(timeout=30) as workers, pytest.raises(InputError, match=r"^model: is damaged"):
        WorkerRunner(name, target.checkpoint, target.dtype, workers)


def test_a_worker_that_died_is_started_again(fake, name):
    fake("hello(); request()")
    with Workers(timeout=30) as workers:
        first = workers.get(name)
        assert workers.get(name) is first
        with pytest.raises(CannotRunError, match="ended with 0"):
            first.ask((), op="load")
        assert workers.get(name) is not first


def test_a_copy_that_cannot_be_imported_ends_the_command_with_3(checkpoints, tmp_path, capsys):
    copy = edited_copy(tmp_path, "models/qwen3_5.py", "class DecoderLayer(nn.Module)", "class :")
    model = str(checkpoints.path("tiny-k3", "float32"))
    assert main(["run", "--model", model, "--oracle", f"mlx-lm@{copy}"]) == 3
    first, *_ = capsys.readouterr().err.splitlines()
    assert first.startswith(f"parity: could not run: mlx-lm@{copy}: SyntaxError: ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--oracle", "mlx-lm@/nowhere"], "/nowhere holds no mlx_lm package. Give the folder that"),
        (["--oracle", "mlx-lm==../x"], "mlx-lm==../x: is no version. Give one such as"),
        (["--oracle", "mlx-lm=="], "mlx-lm==: no such runner. Known runners: impl, mlx-lm,"),
        (["--oracle", "mlx-lm", "--worker-timeout", "0"], "--worker-timeout 0: is no time."),
        (
            ["--candidate", "mlx-lm", "--oracle", "transformers", "--semantics", "mlx-lm-0.31"],
            "--semantics mlx-lm-0.31: only impl has a choice. Drop it.",
        ),
    ],
)
def test_a_name_or_option_that_cannot_be_used_is_bad_input(capsys, arguments, message):
    assert main(["run", *arguments]) == 2
    assert message in capsys.readouterr().err


STATES = {
    "load(); answer(ok=True, info={})": "answered without rows",
    "load(); answer(ok=True, info={}, rows=[1])": "wrote no readable tensors",
    "load(); answer(ok=True, info={}, rows=3)": "wrote no readable tensors",
    "load(); answer(ok=True, info={}, rows=['x'])": "wrote no readable tensors",
}


@pytest.mark.parametrize("script", STATES)
def test_a_worker_that_fails_to_show_states_is_blamed(checkpoints, fake, name, script):
    target = checkpoints.target("tiny-k3", "float32", "chunk-2")
    (program,) = target.programs.values()
    fake(script)
    with Workers() as workers:
        runner = WorkerRunner(name, target.checkpoint, "float32", workers)
        with pytest.raises(CannotRunError, match=STATES[script]):
            runner.states(program)
