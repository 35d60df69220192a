"""`parity inspect` on a 27B checkpoint of 64 layers in 11 sparse files, beside its start alone."""

import subprocess
import sys

import pytest

from parity.cli import main


@pytest.mark.parametrize("command", ["--help", "inspect"])
def test_a_whole_process(benchmark, tmp_path, command):
    benchmark.group = "parity inspect of a 27B, process and all"
    folder = tmp_path / "model"
    arguments = ["--size", "qwen3.8-27b", "--shards", "11", "--headers-only", "--mtp", "--vision"]
    assert main(["make-checkpoint", str(folder), *arguments]) == 0
    words = ["--help"] if command == "--help" else ["inspect", str(folder)]
    benchmark.pedantic(
        lambda: subprocess.run(
            [sys.executable, "-m", "parity", *words], check=True, capture_output=True
        ),
        rounds=7,
        warmup_rounds=1,
    )
