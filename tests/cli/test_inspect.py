"""`parity inspect` as it is typed: exit codes, output, memory, and no framework in its process."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
from damaged_checkpoints import rewrite, shifted, with_draft_head

from parity.cli import main

FRAMEWORKS = ("torch", "transformers", "mlx", "mlx_lm")
_CHECK = f"""
import resource, sys
from parity.cli import main
code = main(sys.argv[1:])
try:  # Linux: getrusage would count the process that this one was forked from
    status = open("/proc/self/status").read()
    peak = int(status.split("VmHWM:")[1].split()[0])
except OSError:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
found = [name for name in {FRAMEWORKS} if name in sys.modules]
print("CHECK", code, peak, ",".join(found))
"""


def process(*arguments, before=""):
    """Run the command in a process of its own: exit code, peak KiB, frameworks."""
    done = subprocess.run(
        [sys.executable, "-c", before + _CHECK, *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert "CHECK" in done.stdout, done.stderr
    _, code, peak, found = done.stdout.splitlines()[-1].split(" ")
    return int(code), int(peak), [name for name in found.split(",") if name]


@pytest.fixture(scope="module")
def big(tmp_path_factory):
    """A 27B checkpoint of 64 layers in 11 sparse files."""
    folder = tmp_path_factory.mktemp("big") / "model"
    arguments = ["--size", "qwen3.8-27b", "--shards", "11", "--headers-only", "--mtp", "--vision"]
    assert main(["make-checkpoint", str(folder), *arguments]) == 0
    return folder


@pytest.fixture
def conversion(checkpoints):
    return checkpoints.path("tiny", "bfloat16", "mlx-lm")


@pytest.fixture
def babbling(conversion, tmp_path):
    return rewrite(conversion, tmp_path / "babbling", with_draft_head)


@pytest.mark.parametrize("arguments", [[], ["--no-evidence"], ["--json"]])
def test_a_27b_takes_100_mb_and_no_framework(big, arguments):
    code, peak, found = process("inspect", big, *arguments)
    assert (code, found) == (0, [])
    assert peak < 100 * 1024


def test_a_repair_needs_no_framework_either(babbling, tmp_path):
    code, _, found = process("inspect", babbling, "--repair", tmp_path / "fixed")
    assert (code, found) == (0, [])
    assert (tmp_path / "fixed" / "model.safetensors").exists()


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_the_proof_can_fail(conversion, name):
    *_, found = process("inspect", conversion, before=f"import {name}\n")
    assert name in found


def test_the_text_names_the_verdict_and_every_rule(capsys, babbling):
    assert main(["inspect", str(babbling)]) == 1
    text = capsys.readouterr().out
    assert text.startswith(f"{babbling}: differs\nThe gains are stored as γ: mlx-lm-0.31, ")
    for expected in ("mlx-swift-lm-403  add 1  γ+1", "disagreements (x)", "1 tensors, 88 bytes"):
        assert expected in text


def test_json_goes_to_a_file_or_to_the_output(capsys, conversion, tmp_path):
    assert main(["inspect", str(conversion), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert main(["inspect", str(conversion), "--json", str(tmp_path / "r.json")]) == 0
    written = json.loads((tmp_path / "r.json").read_text())
    assert {k: v for k, v in printed.items() if k != "repeat"} == {
        k: v for k, v in written.items() if k != "repeat"
    }
    assert printed["repeat"] == f"parity inspect {conversion} --json"


def test_a_rule_is_chosen(capsys, babbling):
    assert main(["inspect", str(babbling), "--rule", "mlx-lm-0.31", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["contradicted"]


def test_a_repair_says_what_it_did_and_the_copy_holds(capsys, conversion, tmp_path):
    broken = rewrite(conversion, tmp_path / "broken", lambda a: with_draft_head(shifted(-1)(a)))
    out = tmp_path / "fixed"
    assert main(["inspect", str(broken), "--repair", str(out), "--json", str(tmp_path / "r")]) == 0
    text = capsys.readouterr().out
    assert f"{out}: repaired: +1 on 17 gains (stored as γ−1); 1 tensors dropped (draft head" in text
    assert json.loads((tmp_path / "r").read_text())["repair"]["dropped"][0][0] == "mtp.norm.weight"
    assert main(["inspect", str(out)]) == 0


@pytest.fixture
def refuses(capsys):
    def run(*arguments, code=2):
        assert main(["inspect", *map(str, arguments)]) == code
        said = capsys.readouterr().err
        assert said.startswith("parity: ")
        assert "Traceback" not in said
        return said

    return run


def test_bad_input_is_refused(refuses, conversion, tmp_path):
    assert "is no folder" in refuses(tmp_path / "absent")
    assert "nothing to repair" in refuses(conversion, "--repair", tmp_path / "out")
    assert "goes by the gains' values" in refuses(
        conversion, "--repair", tmp_path / "out", "--no-evidence"
    )
    assert "--json" in refuses(conversion, "--json", tmp_path / "none" / "r.json")
    assert not (tmp_path / "out").exists()


def test_an_older_result_is_not_left_behind(refuses, tmp_path):
    path = tmp_path / "r.json"
    path.write_text('{"verdict": "holds"}')
    refuses(tmp_path / "absent", "--json", path)
    value = json.loads(path.read_text())
    assert value["verdict"] == "not-run"
    assert "is no folder" in value["error"]


def test_a_hub_id_without_a_network(refuses, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert "nobody/no-such-model: no such folder" in refuses("nobody/no-such-model", code=3)


def test_names_with_control_codes_are_printed_escaped(capsys, conversion, tmp_path):
    hostile = "mtp.\x1b[2J\n" + "x" * 10_000
    folder = rewrite(conversion, tmp_path / "m", lambda a: a | {hostile: np.ones(1, np.float32)})
    main(["inspect", str(folder)])
    text = capsys.readouterr().out
    assert "\x1b" not in text
    assert len(text) < 10_000


def test_a_reader_that_has_seen_enough_is_no_error(conversion):
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "parity", "inspect", str(conversion)]
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writing)
    assert (done.returncode, done.stderr) == (0, "")


def test_who_refuses_is_told_in_the_text(capsys, conversion, tmp_path):
    def truncated(arrays):
        return {name: value for name, value in arrays.items() if "layers.5." not in name}

    assert main(["inspect", str(rewrite(conversion, tmp_path / "m", truncated))]) == 0
    text = capsys.readouterr().out
    assert "; mlx-lm refuses to load it: 14 missing (language_model.model.layers.5." in text
    assert "  mlx-lm           refuses it: 14 missing" in text
