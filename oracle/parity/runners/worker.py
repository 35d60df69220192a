"""Runners in a process of their own: a published mlx-lm, or a checkout or edited copy of it.

`mlx-lm==0.31.3` runs in an environment built for that version, `mlx-lm@PATH` the package below PATH
with the mlx this runs on. Requests and answers are JSON lines, tensors are files; whatever goes
wrong over there (a crash, a hang, garbage) is a CannotRunError here.
"""

import contextlib
import json
import queue
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import numpy as np

import parity
import qwen35
from parity import safetensors_file
from parity.environments import VERSIONED, environment, package_folder
from parity.processes import ending, kill_group, tail
from parity.program import Program
from parity.runners import worker_main
from parity.states import RowStates, States
from parity.trace import Feed, Trace
from qwen35.config import parse_config
from qwen35.errors import CannotRunError, CheckpointError, InputError
from qwen35.headers import Checkpoint

DEFAULT_TIMEOUT = 3600.0
_LONGEST = 64_000_000  # bytes of an answer


class Workers:
    """The worker processes of a run, started when first asked for and ended together.

    `cache` keeps environments, `timeout` is the seconds a worker may take to answer, `device` the
    MLX device it computes on, and `say` is told what takes time.
    """

    def __init__(
        self,
        cache: Path | None = None,
        timeout: float = DEFAULT_TIMEOUT,
        device: str = "cpu",
        say: Callable[[str], None] = lambda message: None,
    ) -> None:
        self.cache = Path.home() / ".cache" / "qwen35-parity" if cache is None else cache
        self.timeout, self.device, self.say = timeout, device, say
        self._workers: dict[str, Worker] = {}

    def get(self, name: str) -> "Worker":
        """Return the running worker of this runner name. Raises InputError and CannotRunError."""
        worker = self._workers.get(name)
        if worker is None or not worker.alive:
            worker = self._workers[name] = self._start(name)
        return worker

    def _start(self, name: str) -> "Worker":
        if name.startswith(VERSIONED):
            version = name.removeprefix(VERSIONED)
            built = environment(version, self.cache, self.say)
            worker = Worker(name, [str(built.python), "-I"], None, self.timeout)
            if worker.hello["mlx_lm"] != version:
                raise worker.failure(f"runs mlx-lm {worker.hello['mlx_lm']}")
            return worker
        folder = package_folder(name)
        # -P: the script's folder stays off the path, as its mlx_lm.py is not the package.
        worker = Worker(name, [sys.executable, "-P"], folder, self.timeout)
        if not Path(worker.hello["file"]).resolve().is_relative_to(folder):
            raise worker.failure(f"imported {worker.hello['file']}, which is not below {folder}")
        return worker

    def close(self) -> None:
        """End all workers."""
        for worker in self._workers.values():
            worker.close()
        self._workers.clear()

    def __enter__(self) -> "Workers":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self.close()


class Worker:
    """One worker process; `hello` is what it said of itself when it started.

    `interpreter` is the command that runs a Python script, `mlx_lm` the folder to import it from.
    """

    script = Path(worker_main.__file__)

    def __init__(
        self, name: str, interpreter: list[str], mlx_lm: Path | None, timeout: float
    ) -> None:
        self.name, self.timeout = name, timeout
        self.loaded: object = None
        packages = {m.__name__: str(Path(m.__file__ or "").parent) for m in (qwen35, parity)}
        setup = json.dumps({"packages": packages, "mlx_lm": str(mlx_lm) if mlx_lm else None})
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - read after the process has ended
        try:
            self._process = subprocess.Popen(
                [*interpreter, str(self.script), setup],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                start_new_session=True,
            )
        except OSError as error:
            raise CannotRunError(f"{name}: {interpreter[0]}: {error.strerror or error}") from None
        self._end = weakref.finalize(self, _end, self._process)
        assert self._process.stdout is not None
        self._answers: queue.Queue[bytes] = queue.Queue()
        threading.Thread(
            target=_read, args=(self._process.stdout, self._answers), daemon=True
        ).start()
        self.hello = self._receive(("mlx_lm", "file", "mlx", "python"))
        if self.hello.get("protocol") != worker_main.PROTOCOL:
            raise self.failure(f"speaks protocol {self.hello.get('protocol')!r}")

    @property
    def alive(self) -> bool:
        """Whether it can be asked."""
        return self._end.alive and self._process.poll() is None

    def ask(self, due: tuple[str, ...], **request: Any) -> dict[str, Any]:
        """Send a request and return the answer, which must have the fields `due`.

        Raises InputError where the worker refuses its input. Raises CannotRunError, and ends the
        worker, where it crashes, hangs or answers something else.
        """
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # it is gone, which the missing answer will tell
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
        return self._receive(due)

    def _receive(self, due: tuple[str, ...]) -> dict[str, Any]:
        try:
            line = self._answers.get(timeout=self.timeout)
        except queue.Empty:
            raise self.failure(
                f"gave no answer in {self.timeout:g} s and was stopped. Give it longer with "
                "--worker-timeout"
            ) from None
        except BaseException:
            self.close()  # the next answer would be that of this request
            raise
        if not line:
            raise self.failure(f"the worker {ending(self._process.wait())}")
        try:
            answer = json.loads(line)
        except ValueError:
            answer = None
        if isinstance(answer, dict) and isinstance(answer.get("error"), str):
            if answer.get("kind") == "input":
                raise InputError(answer["error"])
            if answer.get("kind") != "cannot run":
                self.close()  # an error it did not foresee: what state is it in?
            raise CannotRunError(f"{self.name}: {answer['error']}")
        if not isinstance(answer, dict) or answer.get("ok") is not True:
            raise self.failure(f"answered {line[:80]!r}, a line of JSON is due")
        if lacking := [field for field in due if field not in answer]:
            raise self.failure(f"answered without {', '.join(lacking)}")
        return answer

    def failure(self, problem: str) -> CannotRunError:
        """End the worker, and return the error that says why and what it said last."""
        self.close()
        return CannotRunError(f"{self.name}: {problem}.{tail(self._errors)}")

    def close(self) -> None:
        """End the process and all it started."""
        self._end()


def _end(process: subprocess.Popen) -> None:
    kill_group(process)
    assert process.stdin is not None
    with contextlib.suppress(OSError):  # what was not sent yet has no reader
        process.stdin.close()


def _read(stream: IO[bytes], answers: "queue.Queue[bytes]") -> None:
    """Pass on lines; an empty one says that there will be no more."""
    with stream:
        while line := stream.readline(_LONGEST):
            answers.put(line)
    answers.put(b"")


class WorkerRunner:
    """Runs programs in a worker; the traces are mlx-lm's, read back from files."""

    def __init__(self, name: str, checkpoint: Checkpoint, dtype: str, workers: Workers) -> None:
        self.name = name
        self._workers, self._token = workers, object()
        self._config = parse_config(checkpoint.config, checkpoint.path)
        self._request = {
            "checkpoint": str(checkpoint.path.resolve()),
            "dtype": dtype,
            "device": workers.device,
        }
        self._loaded()

    def _loaded(self) -> Worker:
        """Return the worker with this checkpoint loaded: another runner may have used it."""
        worker = self._workers.get(self.name)
        if worker.loaded is not self._token:
            worker.loaded = None
            answer = worker.ask(("layer_types",), op="load", **self._request)
            if answer["layer_types"] != list(self._config.layer_types):
                raise worker.failure(f"loaded layers {answer['layer_types']}")
            worker.loaded = self._token
        return worker

    def run(self, program: Program, feed: Feed | None = None) -> Trace:
        """See Runner."""
        program.check_vocabulary(self._config.vocab_size)
        worker = self._loaded()
        with tempfile.TemporaryDirectory(prefix="parity-worker-") as folder:
            fed = Path(folder, "feed")
            if feed is not None:
                safetensors_file.write(fed, self._fed(program, feed))
            answer = worker.ask(
                ("info", "forwards"),
                op="run",
                program=program.to_json(),
                feed=None if feed is None else str(fed),
                out=folder,
            )
            trace = Trace(self.name, self._config.layer_types, _info(worker, answer))
            with _reading(worker):
                for forward in answer["forwards"]:
                    file = Path(folder, f"{int(forward)}.safetensors")
                    for tap, value in safetensors_file.read(file).items():
                        trace.add(forward, tap, value)
        return trace

    def states(self, program: Program) -> States:
        """See StatefulRunner."""
        program.check_vocabulary(self._config.vocab_size)
        worker = self._loaded()
        with tempfile.TemporaryDirectory(prefix="parity-worker-") as folder:
            asked = {"op": "states", "program": program.to_json(), "out": folder}
            answer = worker.ask(("info", "rows"), **asked)
            found = States(self.name, self._config.layer_types, _info(worker, answer))
            with _reading(worker):
                for moment, count in enumerate(answer["rows"]):
                    rows: list[RowStates] = [{} for _ in range(count)]
                    file = Path(folder, f"{moment}.safetensors")
                    for key, value in safetensors_file.read(file).items():
                        row, name = key.split(".", 1)
                        rows[int(row)][name] = value
                    found.moments.append(rows)
        return found

    def _fed(self, program: Program, feed: Feed) -> dict[str, np.ndarray]:
        layers = range(len(self._config.layer_types) + 1)
        forwards = range(len(program.forwards()))
        return {f"{f}.{layer}": feed(f, layer) for f in forwards for layer in layers}


def _info(worker: Worker, answer: dict[str, Any]) -> dict[str, Any]:
    hello = worker.hello
    return {**answer["info"], "python": hello["python"], "mlx-lm from": hello["file"]}


@contextlib.contextmanager
def _reading(worker: Worker) -> Iterator[None]:
    """Blame the worker for files that are not what it has answered."""
    try:
        yield
    except (OSError, ValueError, TypeError, IndexError, CheckpointError) as error:
        raise worker.failure(f"wrote no readable tensors ({error})") from None
