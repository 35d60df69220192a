"""Environments are built once, by one builder, from recorded pins; failures leave nothing."""

import json
import subprocess
import sys
import textwrap

import pytest

from parity.environments import MARKER, MLX, environment, pins
from qwen35.errors import CannotRunError, InputError

PYTHON = """#!{python}
# Stands for a Python that makes virtual environments, and for the pip in them.
import json, os, shutil, sys, time
words = sys.argv[1:]
with open({log!r}, "a") as log:
    log.write(json.dumps(words) + "\\n")
if words[1:3] == ["-m", "venv"]:
    os.makedirs(words[3] + "/bin")
    shutil.copy(__file__, words[3] + "/bin/python")
elif words[3] == "list":
    print(json.dumps([dict(name="mlx-lm", version="1")]))
else:
    {install}
"""


@pytest.fixture
def python(tmp_path):
    """Return a function that makes a fake Python, whose pip does `install`."""

    def make(install="time.sleep(0.3)"):
        file = tmp_path / "python"
        log = str(tmp_path / "log")
        file.write_text(PYTHON.format(python=sys.executable, log=log, install=install))
        file.chmod(0o755)
        return file

    return make


def installs(tmp_path):
    lines = (tmp_path / "log").read_text().splitlines()
    return [words for words in map(json.loads, lines) if "install" in words]


def test_an_environment_is_built_once_from_its_pins_and_found_again(python, tmp_path):
    said = []
    built = environment("0.31.3", tmp_path / "cache", said.append, python())
    again = environment("0.31.3", tmp_path / "cache", said.append, python())
    assert again == built
    assert built.packages == {"mlx-lm": "1"}
    (words,) = installs(tmp_path)
    assert {"mlx-lm==0.31.3", "mlx[cpu]==0.31.2", "--disable-pip-version-check"} <= set(words)
    assert len(said) == 1
    assert "building the environment of mlx-lm 0.31.3" in said[0]


def test_two_builders_at_once_build_once(python, tmp_path):
    code = textwrap.dedent("""
        import sys
        from pathlib import Path
        from parity.environments import environment
        print(environment("0.31.3", Path(sys.argv[1]), python=sys.argv[2]).folder)
    """)
    command = [sys.executable, "-c", code, str(tmp_path / "cache"), str(python())]
    builders = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    outputs = [builder.communicate(timeout=60)[0] for builder in builders]
    assert [builder.returncode for builder in builders] == [0, 0]
    assert len(installs(tmp_path)) == 1
    assert outputs[0] == outputs[1]


def test_the_second_builder_says_that_it_waits_and_gives_up_in_time(python, tmp_path):
    import fcntl

    said = []
    folder = tmp_path / "cache" / "envs"
    folder.mkdir(parents=True)
    with open(folder / f"{pins('0.31.3').folder}.lock", "w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(
            CannotRunError, match=r"another process has held it for 0\.5 s\. End that"
        ):
            environment("0.31.3", tmp_path / "cache", said.append, python(), seconds=0.5)
    assert said == [f"waiting for another process that builds {pins('0.31.3').folder}"]


def test_without_a_network_the_error_says_what_is_missing_and_what_pip_said(python, tmp_path):
    broken = python("sys.exit('ERROR: No matching distribution found for mlx-lm==0.31.3')")
    with pytest.raises(CannotRunError) as caught:
        environment("0.31.3", tmp_path / "cache", python=broken)
    said = str(caught.value)
    assert said.startswith("mlx-lm==0.31.3: its environment (mlx-lm==0.31.3, mlx[cpu]==0.31.2, ")
    assert "cannot be built: pip ended with 1. Connect to a package index once, or give" in said
    assert said.endswith("    ERROR: No matching distribution found for mlx-lm==0.31.3")
    assert [p.suffix for p in (tmp_path / "cache" / "envs").iterdir()] == [".lock"]
    assert environment("0.31.3", tmp_path / "cache", python=python()).folder.is_dir()


def test_a_build_that_hangs_is_stopped(python, tmp_path):
    with pytest.raises(CannotRunError, match="pip was not done in time and was stopped"):
        environment("0.31.3", tmp_path, python=python("time.sleep(60)"), seconds=1)


def test_what_a_killed_builder_left_is_removed(python, tmp_path):
    left = tmp_path / "envs" / f"{pins('0.31.3').folder}.building-x"
    left.mkdir(parents=True)
    built = environment("0.31.3", tmp_path, python=python())
    assert not left.exists()
    assert (built.folder / MARKER).is_file()


@pytest.mark.parametrize("marker", ["", "[]", '{"asked": ["mlx-lm==0.31.3"], "packages": {}}'])
def test_an_environment_of_other_pins_or_without_a_marker_is_built_anew(python, tmp_path, marker):
    folder = environment("0.31.3", tmp_path, python=python()).folder
    (folder / MARKER).write_text(marker)
    environment("0.31.3", tmp_path, python=python())
    assert len(installs(tmp_path)) == 2


def test_a_version_that_is_not_on_record_takes_the_newest_mlx_and_says_so(python, tmp_path):
    said = []
    environment("0.99.0", tmp_path, said.append, python())
    assert said[1] == "mlx-lm 0.99.0 has no mlx version on record: the newest that fits is taken"
    assert installs(tmp_path)[0][-4:] == [
        "mlx-lm==0.99.0",
        "mlx[cpu]",
        "numpy>=2",
        "ml_dtypes>=0.5",
    ]


def test_the_newest_version_goes_with_the_mlx_that_runs_here():
    import importlib.metadata

    assert pins("0.32.2").mlx == importlib.metadata.version("mlx")
    assert "0.32.2" not in MLX


@pytest.mark.parametrize("version", ["", "latest", "0.31.3 x", "../0.31", "0.31.3;x", "-0"])
def test_what_is_no_version_never_reaches_pip(tmp_path, version):
    with pytest.raises(InputError, match="is no version"):
        environment(version, tmp_path)


def test_a_cache_that_cannot_be_written_is_named(python, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(CannotRunError, match=r"Give a --cache folder that can be written\."):
        environment("0.31.3", tmp_path / "file", python=python())
