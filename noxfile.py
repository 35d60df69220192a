"""What this project is checked with; `nox -l` lists it. Versions come from pyproject.toml."""

import os
from pathlib import Path

import nox

nox.needs_version = ">=2025.5"
nox.options.sessions = ["parity"]
# pip finds a CPU build of torch where uv would fetch a CUDA one of several GB.
nox.options.default_venv_backend = "virtualenv"
nox.options.reuse_venv = "yes"

PYPROJECT = nox.project.load_toml("pyproject.toml")
OUT = Path("build/parity")


def install(session: nox.Session, *groups: str, extra: str = "[oracles]") -> None:
    """Install the project as it is on disk, and the dependency groups, in one resolution."""
    packages = [p for group in groups for p in nox.project.dependency_groups(PYPROJECT, group)]
    session.install("-e", f".{extra}", *packages)


@nox.session
def parity(session: nox.Session) -> None:
    """The main job: the implementation against mlx-lm and transformers, with reports."""
    install(session)
    OUT.mkdir(parents=True, exist_ok=True)
    reports = [f"--{kind}={OUT / name}" for kind, name in REPORTS.items()]
    # By its path from here, so that the commands in the report can be typed as they are.
    command = os.path.relpath(Path(session.bin) / "parity") if session.bin_paths else "parity"
    # The suite's shapes are small: a second thread mostly waits, and on shared cores it spins.
    threads = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    session.run(command, "run", *reports, *session.posargs, external=True, env=threads)


REPORTS = {"json": "result.json", "html": "report.html", "junit": "junit.xml"}


@nox.session
def tests(session: nox.Session) -> None:
    """The test suite: units, properties, faults that must be caught, command line, browser."""
    install(session, "test")
    session.run("pytest", "--ignore=tests/benchmarks", *session.posargs)


@nox.session
def nightly(session: nox.Session) -> None:
    """The long tests: 200 seeds of clean pairs, properties drawn afresh; the seed is printed."""
    install(session, "test")
    places = ("tests/nightly", "tests/properties", "tests/unit")
    drawn = ("-m", "not workers", "--hypothesis-profile=nightly")
    session.run("pytest", *places, *drawn, *session.posargs)


@nox.session
def fuzz(session: nox.Session) -> None:
    """Coverage-guided fuzzing of the header reader, for a minute."""
    install(session, "fuzz", extra="")
    session.run("python", "tests/fuzz/fuzz_headers.py", "-max_total_time=60", *session.posargs)


@nox.session
def workers(session: nox.Session) -> None:
    """Published versions of mlx-lm, each in an environment of its own (about 400 MB, kept)."""
    install(session, "test")
    session.run("pytest", "-m", "workers", *session.posargs)


@nox.session
def lint(session: nox.Session) -> None:
    """Formatting, lint, import directions and types."""
    install(session, "lint", extra="")
    session.run("ruff", "format", "--check", ".")
    session.run("ruff", "check", ".")
    session.run("lint-imports")
    session.run("mypy")


@nox.session
def bench(session: nox.Session) -> None:
    """Speed and memory, as ratios within one run; nothing is asserted."""
    install(session, "test")
    session.run("pytest", "tests/benchmarks", "--benchmark-only", *session.posargs)
