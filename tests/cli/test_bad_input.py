"""What cannot be used is refused in one line that names it and the remedy, without a traceback."""

import json
import shutil
import sys

import pytest

from parity.cli import main


@pytest.fixture
def model(checkpoints, tmp_path):
    """A copy of a small checkpoint that a test may damage."""
    return shutil.copytree(checkpoints.path("tiny", "float32"), tmp_path / "model")


@pytest.fixture
def refuses(capsys):
    """Run `parity run` and return its complaint; it must exit with the code given."""

    def run(*arguments, code=2):
        assert main(["run", *map(str, arguments)]) == code
        printed = capsys.readouterr()
        assert "Traceback" not in printed.err
        assert printed.err.startswith("parity: ")
        return printed.err

    return run


def change_config(model, **changes):
    path = model / "config.json"
    config = json.loads(path.read_text())
    config["text_config"] |= changes
    path.write_text(json.dumps(config))


def program(tmp_path, value):
    path = tmp_path / "program.json"
    path.write_text(value if isinstance(value, str) else json.dumps(value))
    return path


def test_a_folder_that_is_not_there(refuses, tmp_path):
    assert "is no folder" in refuses("--model", tmp_path / "absent")


def test_no_config(refuses, model):
    (model / "config.json").unlink()
    assert "config.json: cannot be read" in refuses("--model", model)


def test_a_truncated_shard(refuses, model):
    shard = model / "model.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1000])
    said = refuses("--model", model)
    assert "model.safetensors: tensor" in said
    assert "truncated" in said


def test_a_header_longer_than_the_file(refuses, model):
    (model / "model.safetensors").write_bytes(b"\xff\xff\xff\x00\x00\x00\x00\x00{}")
    assert "model.safetensors" in refuses("--model", model)


def test_a_wrong_shape_for_the_config(refuses, model):
    change_config(model, intermediate_size=72)
    said = refuses("--model", model)
    assert "mlp.down_proj.weight' has shape [44, 68], config.json asks for [44, 72]" in said


def test_a_layer_that_the_config_does_not_have(refuses, model):
    change_config(model, num_hidden_layers=6, layer_types=None)
    assert "layers.6" in refuses("--model", model)


def test_an_unknown_model_type(refuses, model):
    path = model / "config.json"
    path.write_text(path.read_text().replace('"qwen3_5"', '"qwen9"'))
    assert "'qwen9'" in refuses("--model", model)


def test_ids_outside_the_vocabulary(refuses, model, tmp_path):
    steps = [{"op": "prefill", "ids": [[1, 131]]}]
    file = program(tmp_path, {"schema": 1, "steps": steps})
    said = refuses("--model", model, "--program", file)
    assert "steps[0].ids[0][1] is 131, outside the vocabulary of 131" in said


def test_an_empty_prompt(refuses, model, tmp_path):
    file = program(tmp_path, {"schema": 1, "steps": [{"op": "prefill", "ids": [[]]}]})
    assert "empty prompt" in refuses("--model", model, "--program", file)


def test_a_program_that_is_no_json(refuses, model, tmp_path):
    said = refuses("--model", model, "--program", program(tmp_path, "{"))
    assert "program.json: is no JSON" in said


def test_an_unknown_oracle_and_the_arbiter_as_an_oracle(refuses):
    assert "no such runner" in refuses("--oracle", "llama.cpp")
    assert "arbiter" in refuses("--oracle", "reference")


def test_an_oracle_that_is_the_candidate(refuses):
    assert "other than the candidate" in refuses("--oracle", "impl", "--case", "tiny/*/one-shot")


def test_a_pattern_that_matches_no_case(refuses):
    assert "no case of the suite matches" in refuses("--case", "nothing*")


def test_a_policy_that_is_malformed(refuses, tmp_path):
    path = tmp_path / "policy.toml"
    path.write_text("schema = 2")
    assert "schema is 2" in refuses("--policy", path)


def test_a_report_in_a_folder_that_is_not_there(refuses, tmp_path):
    assert "--html" in refuses("--html", tmp_path / "none" / "report.html")


@pytest.mark.parametrize("name", ["mlx_lm", "transformers"])
def test_an_oracle_that_is_not_installed(refuses, monkeypatch, model, name):
    for module in [m for m in sys.modules if m.split(".")[0] == name]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, name, None)
    said = refuses("--model", model, "--oracle", name.replace("_", "-"), code=3)
    assert f"{name.replace('_', '-')} is not installed" in said
    assert "pip install 'qwen35-parity[oracles]'" in said


@pytest.mark.parametrize(
    ("name", "absent"),
    [
        ("mlx_lm", "mlx_lm.utils"),
        ("mlx_lm", "transformers"),
        ("transformers", "transformers.utils"),
        ("transformers", "regex"),
    ],
)
def test_an_oracle_that_is_installed_and_broken(refuses, monkeypatch, model, name, absent):
    for module in [m for m in sys.modules if m.split(".")[0] == name]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, absent, None)
    said = refuses("--model", model, "--oracle", name.replace("_", "-"), code=3)
    assert "is installed but cannot be imported: ModuleNotFoundError" in said
    assert absent in said


def test_a_hub_id_without_a_network(refuses, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    said = refuses("--model", "nobody/no-such-model", code=3)
    assert "nobody/no-such-model: no such folder" in said
    assert "HF_HUB_OFFLINE" in said


def test_a_required_device_that_is_absent(refuses, monkeypatch):
    monkeypatch.setattr("parity.commands.run.select_device", lambda name: False)
    assert "no gpu device" in refuses("--device", "gpu", "--require-device", code=3)


def test_an_absent_device_is_not_run_and_never_passed(refuses, monkeypatch, tmp_path):
    monkeypatch.setattr("parity.commands.run.select_device", lambda name: False)
    refuses("--device", "gpu", "--json", tmp_path / "r.json", code=5)
    assert json.loads((tmp_path / "r.json").read_text())["verdict"] == "not-run"


def test_an_older_result_is_not_left_behind(refuses, tmp_path):
    path = tmp_path / "r.json"
    path.write_text('{"verdict": "holds"}')
    refuses("--model", tmp_path / "absent", "--json", path)
    value = json.loads(path.read_text())
    assert value["verdict"] == "not-run"
    assert "is no folder" in value["error"]


def test_nothing_compared_is_no_success(capsys, checkpoints):
    converted = checkpoints.path("tiny", "float32", "mlx-lm")
    assert main(["run", "--model", str(converted), "--oracle", "transformers"]) == 5
    assert "cannot load a checkpoint in mlx-lm's layout" in " ".join(
        capsys.readouterr().out.split()
    )


def test_two_reports_in_one_file(refuses, tmp_path):
    assert "one path" in refuses("--json", tmp_path / "r", "--html", tmp_path / "r")


@pytest.mark.parametrize("option", ["--model", "--json", "--policy"])
def test_a_name_too_long_for_a_path(refuses, option):
    refuses(option, "a" * 300)


def test_a_disk_that_is_full_while_it_complains(refuses, tmp_path):
    assert "none.toml" in refuses("--policy", tmp_path / "none.toml", "--json", "/dev/full")


def test_a_fault_of_parity_itself_is_not_read_as_a_difference(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr("parity.suite.selected", lambda *args: 1 / 0)
    assert main(["run", "--json", str(tmp_path / "r.json")]) == 3
    assert "a fault of parity itself (ZeroDivisionError" in capsys.readouterr().err
    assert json.loads((tmp_path / "r.json").read_text())["verdict"] == "not-run"
