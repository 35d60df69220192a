"""Isolated environments for published versions of mlx-lm, built once and kept in a cache folder.

An environment is built under a temporary name and renamed when it is complete, so one that has its
marker file is whole. A lock a version keeps two builders apart.
"""

import contextlib
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from parity.processes import kill_group, tail
from qwen35.errors import CannotRunError, InputError

MLX = {
    "0.28.0": "0.29.2",
    "0.30.2": "0.30.1",
    "0.30.5": "0.30.5",
    "0.30.7": "0.30.6",
    "0.31.1": "0.31.1",
    "0.31.2": "0.31.1",
    "0.31.3": "0.31.2",
    "0.32.0": "0.32.2",
}
"""mlx-lm version -> the mlx version of its time, whose bits its results are known by."""
CURRENT = ("0.32.2",)
"""mlx-lm versions that go with the mlx this runs on."""
TRANSFORMERS = "5.24.0"
"""The transformers that the other versions in these tables were seen to import and run with."""
_OWN_TRANSFORMERS = {"0.30.2": "5.0.0rc1", "0.30.5": "5.0.0rc3"}  # their packages ask for no other
VERSIONED, EDITED = "mlx-lm==", "mlx-lm@"
"""What the names of runners in an environment and of runners of an edited copy begin with."""
MARKER = "environment.json"
BUILD_SECONDS = 1800.0
_VERSION = re.compile(r"\d+(\.\d+)*((a|b|rc|\.post|\.dev)\d+)?")
_SCHEMA = 1

Say = Callable[[str], None]


@dataclass(frozen=True)
class Pins:
    """The packages of one environment; None where pip is to choose the newest that fits."""

    mlx_lm: str
    mlx: str | None
    transformers: str | None

    @property
    def requirements(self) -> list[str]:
        """What pip is asked for; the extra adds the CPU backend on Linux, nothing on macOS."""
        mlx = "mlx[cpu]" + (f"=={self.mlx}" if self.mlx else "")
        transformers = [f"transformers=={self.transformers}"] if self.transformers else []
        return [f"mlx-lm=={self.mlx_lm}", mlx, *transformers, "numpy>=2", "ml_dtypes>=0.5"]

    @property
    def folder(self) -> str:
        """The folder's name: one a set of pins and a Python version."""
        python = f"py{sys.version_info.major}.{sys.version_info.minor}"
        return f"mlx-lm-{self.mlx_lm}-mlx-{self.mlx or 'newest'}-{python}"


def pins(version: str) -> Pins:
    """Return what goes with a version of mlx-lm. Raises InputError for what is no version."""
    if not _VERSION.fullmatch(version):
        raise InputError(f"mlx-lm=={version}: is no version. Give one such as mlx-lm==0.31.3.")
    if version in CURRENT:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return Pins(version, importlib.metadata.version("mlx"), TRANSFORMERS)
    if version in MLX:
        return Pins(version, MLX[version], _OWN_TRANSFORMERS.get(version, TRANSFORMERS))
    return Pins(version, None, None)


def package_folder(name: str) -> Path:
    """Return PATH of `mlx-lm@PATH`. Raises InputError where no mlx_lm package lies below it."""
    folder = Path(name.removeprefix(EDITED)).resolve()
    if not (folder / "mlx_lm" / "__init__.py").is_file():
        raise InputError(
            f"{name}: {folder} holds no mlx_lm package. Give the folder that contains mlx_lm/."
        )
    return folder


@dataclass(frozen=True)
class Environment:
    """A finished environment and the versions of all that is installed in it."""

    folder: Path
    packages: dict[str, str]

    @property
    def python(self) -> Path:
        """Its interpreter."""
        return self.folder / "bin" / "python"


def environment(
    version: str,
    cache: Path,
    say: Say = lambda message: None,
    python: Path | str = sys.executable,
    seconds: float = BUILD_SECONDS,
) -> Environment:
    """Return the environment of an mlx-lm version below `cache`, built where it is not there yet.

    `say` is told what takes time and what is not pinned; `python` makes the virtual environment and
    the build may take `seconds`. Raises InputError for what is no version and CannotRunError where
    the environment cannot be built. Nothing half-built is left behind.
    """
    due = pins(version)
    folder = cache / "envs" / due.folder
    if found := _read(folder, due):
        return found
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _lock(folder.with_name(f"{due.folder}.lock"), seconds, say):
            return _read(folder, due) or _build(folder, due, say, python, seconds)
    except OSError as error:
        raise CannotRunError(
            f"mlx-lm=={version}: {folder}: {error.strerror or error}. Give a --cache folder that "
            "can be written."
        ) from None


def _read(folder: Path, due: Pins) -> Environment | None:
    try:
        marker = json.loads((folder / MARKER).read_text(encoding="utf-8"))
        asked, packages = marker["asked"], marker["packages"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    found = Environment(folder, packages)
    whole = asked == due.requirements and isinstance(packages, dict) and found.python.exists()
    return found if whole else None


def _build(folder: Path, due: Pins, say: Say, python: Path | str, seconds: float) -> Environment:
    say(f"building the environment of mlx-lm {due.mlx_lm} in {folder} (once; about 400 MB)")
    if due.mlx is None:
        say(f"mlx-lm {due.mlx_lm} has no mlx version on record: the newest that fits is taken")
    for left in folder.parent.glob(f"{due.folder}.building-*"):
        shutil.rmtree(left, ignore_errors=True)  # a builder that was killed held the lock
    place = Path(tempfile.mkdtemp(prefix=f"{due.folder}.building-", dir=folder.parent))
    try:
        inside = [str(place / "bin" / "python"), "-I", "-m", "pip"]
        options = ["--disable-pip-version-check", "--no-input", "-q"]
        started = time.monotonic()

        def step(what: str, *command: str) -> str:
            left = seconds - (time.monotonic() - started)
            return _run(due, what, list(command), left)

        step("venv", str(python), "-I", "-m", "venv", str(place))
        step("pip", *inside, "install", *options, "--prefer-binary", *due.requirements)
        listed = step("pip", *inside, "list", "--disable-pip-version-check", "--format=json")
        packages = {p["name"].lower(): p["version"] for p in json.loads(listed)}
        marker: dict[str, Any] = {
            "schema": _SCHEMA,
            "asked": due.requirements,
            "python": sys.version.split()[0],
            "packages": packages,
        }
        (place / MARKER).write_text(json.dumps(marker, indent=1) + "\n", encoding="utf-8")
        if folder.exists():
            shutil.rmtree(folder)  # it lacks its marker, or was built from other pins
        os.rename(place, folder)
    finally:
        shutil.rmtree(place, ignore_errors=True)
    return Environment(folder, packages)


def _run(due: Pins, what: str, command: list[str], seconds: float) -> str:
    """Run one step of a build and return what it printed."""
    with tempfile.TemporaryFile() as errors, tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=errors,
            start_new_session=True,
        )
        try:
            process.wait(max(seconds, 0.1))
            problem = f"{what} ended with {process.returncode}" if process.returncode else None
        except subprocess.TimeoutExpired:
            problem = f"{what} was not done in time and was stopped"
        finally:
            kill_group(process)
        if problem:
            raise CannotRunError(
                f"mlx-lm=={due.mlx_lm}: its environment ({', '.join(due.requirements)}) is not "
                f"there and cannot be built: {problem}. Connect to a package index once, or give a "
                f"--cache that has it.{tail(errors) or tail(output)}"
            )
        output.seek(0)
        return output.read().decode(errors="replace")


@contextlib.contextmanager
def _lock(file: Path, seconds: float, say: Say) -> Iterator[None]:
    """Hold a lock that ends with the process, as long as another builder may take."""
    try:
        import fcntl
    except ImportError:  # no POSIX: the file itself is the lock
        fcntl = None  # type: ignore[assignment]
    flags = os.O_CREAT | os.O_RDWR | (0 if fcntl else os.O_EXCL)
    started, told = time.monotonic(), False
    descriptor = -1
    while True:
        try:
            if descriptor < 0:
                descriptor = os.open(file, flags, 0o644)
            if fcntl:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except (BlockingIOError, FileExistsError):
            if time.monotonic() - started > seconds:
                if descriptor >= 0:
                    os.close(descriptor)
                raise CannotRunError(
                    f"{file}: another process has held it for {seconds:g} s. End that process, "
                    "or remove the file if there is none."
                ) from None
            if not told:
                say(f"waiting for another process that builds {file.stem}")
                told = True
            time.sleep(0.1)
    try:
        yield
    finally:
        os.close(descriptor)
        if not fcntl:
            file.unlink(missing_ok=True)
