"""Whatever a folder holds, `parity inspect` answers with an exit code and one line."""

import contextlib
import io
import json
import os
import shutil
import tempfile
import tracemalloc
from pathlib import Path

import pytest
from damaged_checkpoints import in_shards
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from strategies import JSON, safetensors_file

from parity.cli import main
from qwen35.headers import INDEX

SHARED = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
FILES = ("config.json", INDEX, "model-00001-of-00002.safetensors")


@pytest.fixture(scope="session")
def good(checkpoints):
    """The bytes of a small checkpoint of two shards, by file name."""
    source = checkpoints.path("tiny", "bfloat16", "mlx-lm")
    with tempfile.TemporaryDirectory() as place:
        folder = in_shards(source, Path(place) / "model", 2)
        return {path.name: path.read_bytes() for path in folder.iterdir()}


@contextlib.contextmanager
def folder_of(files):
    place = Path(tempfile.mkdtemp())
    try:
        for name, content in files.items():
            (place / name).write_bytes(content)
        yield place
    finally:
        shutil.rmtree(place)


def inspected(folder, *arguments, codes=(0, 1, 2)):
    """Run the command; an exception that it lets through fails the test."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(["inspect", str(folder), "--json", *arguments])
    assert code in codes
    value = json.loads(out.getvalue())
    assert "\x1b" not in err.getvalue()
    if code == 2:
        said = err.getvalue()
        assert said.startswith("parity: ")
        assert len(said) < 4000
        assert value["verdict"] == "not-run"
    else:
        assert value["exit"] == code
    return code, err.getvalue()


def test_the_undamaged_folder_holds(good):
    with folder_of(good) as folder:
        assert inspected(folder)[0] == 0


@SHARED
@given(data=st.data(), name=st.sampled_from(FILES))
def test_bytes_changed_or_cut(good, data, name):
    content = bytearray(good[name])
    for _ in range(data.draw(st.integers(0, 4))):
        # Mostly within the header, where it matters.
        at = data.draw(st.integers(0, min(len(content), 4000) - 1))
        content[at] = data.draw(st.integers(0, 255))
    if data.draw(st.booleans()):
        del content[data.draw(st.integers(0, len(content))) :]
    with folder_of(good | {name: bytes(content)}) as folder:
        inspected(folder)


@SHARED
@given(data=st.data(), value=JSON)
def test_any_value_in_place_of_any_key_of_the_config(good, data, value):
    config = json.loads(good["config.json"])
    part = data.draw(st.sampled_from([config, config["text_config"]]))
    part[data.draw(st.sampled_from(sorted(part)))] = value
    part[data.draw(st.sampled_from(["quantization", "quantization_config", "x"]))] = data.draw(JSON)
    with folder_of(good | {"config.json": json.dumps(config).encode()}) as folder:
        inspected(folder)


@SHARED
@given(config=JSON | st.text().map(str), header=JSON | st.binary(), index=st.none() | JSON)
def test_any_json_in_place_of_any_file(config, header, index):
    files = {
        "config.json": json.dumps(config).encode(),
        "model.safetensors": safetensors_file(header),
    }
    if index is not None:
        files[INDEX] = json.dumps(index).encode()
    with folder_of(files) as folder:
        inspected(folder, codes=(2,))


LEAVES = st.sampled_from(
    [
        *("norm.weight", "layers.0.linear_attn.conv1d.weight", "lm_head.weight", "mtp.norm.weight"),
        *("layers.0.input_layernorm.weight", "layers.1.input_layernorm.weight"),
        *("layers.0.mlp.up_proj.weight", "layers.0.mlp.up_proj.scales", "x", ""),
        *("\x1b[2J\n.input_layernorm.weight", "\ud800.input_layernorm.weight", "\ud800mtp.x"),
    ]
)
PREFIXES = st.sampled_from(
    ["", "model.", "language_model.model.", "model.language_model.", "vision_tower."]
)
DTYPES = {"F32": 4, "BF16": 2, "U32": 4, "F8_E4M3": 1, "I64": 8}


@SHARED
@given(data=st.data())
def test_any_names_shapes_and_dtypes_in_a_true_header(good, data):
    header, at = {}, 0
    for name in data.draw(st.lists(st.tuples(PREFIXES, LEAVES).map("".join), unique=True)):
        shape = data.draw(st.lists(st.integers(0, 5), max_size=4))
        dtype = data.draw(st.sampled_from(sorted(DTYPES)))
        size = DTYPES[dtype]
        for n in shape:
            size *= n
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + size]}
        at += size
    body = data.draw(st.binary(min_size=at, max_size=at))
    files = {
        "config.json": good["config.json"],
        "model.safetensors": safetensors_file(header, body),
    }
    with folder_of(files) as folder:
        inspected(folder)
        text = io.StringIO()
        with contextlib.redirect_stdout(text), contextlib.redirect_stderr(io.StringIO()):
            main(["inspect", str(folder)])
        text.getvalue().encode()
        assert "\x1b" not in text.getvalue()
        inspected(folder, "--repair", str(folder) + "-out")
        shutil.rmtree(str(folder) + "-out", ignore_errors=True)


def test_links_that_circle_and_folders_in_place_of_files(good, tmp_path):
    for i, make in enumerate((lambda p: p.symlink_to(p), Path.mkdir, lambda p: os.mkfifo(p))):
        for name in FILES:
            place = tmp_path / f"{i}-{name}"
            place.mkdir()
            for other, content in good.items():
                if other != name:
                    (place / other).write_bytes(content)
            make(place / name)
            _, said = inspected(place, codes=(2,))
            assert name in said
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    assert "is no folder" in inspected(tmp_path / "loop", codes=(2,))[1]


def test_stated_sizes_allocate_nothing(good, tmp_path):
    for length in (2**63, 2**40, 99_999_999):
        with folder_of(good) as folder:
            (folder / FILES[2]).write_bytes(length.to_bytes(8, "little") + b"{}")
            inspected(folder, codes=(2,))  # imports are done
            tracemalloc.start()
            inspected(folder, codes=(2,))
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            assert peak < 2_000_000
