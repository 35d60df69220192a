import json
import os
import struct
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file
from strategies import JSON, data_size, safetensors_file, safetensors_headers

from qwen35.errors import CheckpointError
from qwen35.headers import open_checkpoint, read_header

GOOD = {
    "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
    "b": {"dtype": "BF16", "shape": [4], "data_offsets": [24, 32]},
}


def encoded(header, data=b"\0" * 32, length=None):
    return safetensors_file(header, data, length)


def write(tmp_path, content, name="model.safetensors"):
    path = tmp_path / name
    path.write_bytes(content)
    return path


def changed(name, **fields):
    return GOOD | {name: GOOD[name] | fields}


def test_it_agrees_with_the_safetensors_library(tmp_path):
    tensors = {
        "x": np.arange(6, dtype=np.float32).reshape(2, 3),
        "y": np.ones(5, ml_dtypes.bfloat16),
        "empty": np.zeros((0, 3), np.float16),
    }
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    found = read_header(tmp_path / "model.safetensors")
    assert {n: h.shape for n, h in found.items()} == {n: t.shape for n, t in tensors.items()}
    raw = (tmp_path / "model.safetensors").read_bytes()
    assert raw[found["x"].start : found["x"].end] == tensors["x"].tobytes()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "has 0 bytes, 8 are due"),
        (b"\1\0\0", "has 3 bytes, 8 are due"),
        (encoded(GOOD, length=10**6), "header is to have 1000000 bytes, the file has"),
        (struct.pack("<Q", 2**63) + b"{}", "header is to have 9223372036854775808 bytes"),
        (encoded(GOOD, data=b"\0" * 31), "ends at byte .* truncated: fetch"),
        (encoded(GOOD, data=b"\0" * 33), "1 bytes after its last tensor"),
        (encoded(b"\xff{}"), "no JSON"),
        (encoded(b"[1]"), "no JSON object"),
        (encoded(b"[" * 200_000), "nested too deeply"),
        (encoded(b'{"a": 1, "a": 2}'), "the key 'a' twice"),
        (encoded(b'{"a": ' + b"9" * 5000 + b"}"), "no JSON"),
        (encoded({"__metadata__": {"n": 1}}), "__metadata__ is no object of strings"),
        (encoded({"a" * 10**6: 3}), r"tensor 'a+\.\.\.a+' is no JSON object"),
        (encoded({"a": 3}), "tensor 'a' is no JSON object"),
        (encoded(changed("a", dtype="F31")), "tensor 'a' has the unknown dtype 'F31'"),
        (encoded(changed("a", dtype=["F32"])), "tensor 'a' has the unknown dtype"),
        (encoded(changed("a", dtype="F64")), "takes 24 bytes, 48 are due"),
        (encoded(changed("a", shape=[2, -3])), r"has the shape \[2, -3\]"),
        (encoded(changed("a", shape=[2, True])), r"has the shape \[2, True\]"),
        (encoded(changed("a", shape="23")), "has the shape '23'"),
        (encoded(changed("a", shape=[10**30, 10**30])), "has the shape"),
        (encoded(changed("a", shape=[2**62] * 64)), "has the shape .* a list of sizes is due"),
        (encoded(changed("a", shape=2.5)), "has the shape 2.5"),
        (encoded(changed("a", shape=json.loads("[" * 900 + "]" * 900))), "has the shape"),
        (encoded(changed("a", dtype="F4", shape=[3])), "ends within a byte"),
        (encoded(changed("a", data_offsets=[0])), r"has the offsets \[0\]"),
        (encoded(changed("a", data_offsets=[24, 0])), "has the offsets"),
        (encoded(changed("a", data_offsets=[-24, 0])), "has the offsets"),
        (encoded(changed("b", data_offsets=[16, 24])), "'b' overlaps"),
        (encoded(changed("b", data_offsets=[28, 36]), b"\0" * 36), "'b' leaves a gap"),
    ],
)
def test_a_lying_header_is_refused_by_file_and_place(tmp_path, content, message):
    path = write(tmp_path, content)
    with pytest.raises(CheckpointError, match=message) as caught:
        read_header(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert "again" in str(caught.value)


def test_a_header_too_large_is_refused_before_it_is_read(tmp_path):
    path = tmp_path / "model.safetensors"
    with open(path, "wb") as stream:
        stream.write(struct.pack("<Q", 100_000_001))
        stream.truncate(200_000_000)  # a hole: it takes no room
    with pytest.raises(CheckpointError, match="100000001 bytes, at most 100000000 are due"):
        read_header(path)


def test_a_folder_in_place_of_a_file_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match=r"cannot be read \(Is a directory\)"):
        read_header(tmp_path)


def test_an_unreadable_file_is_refused(tmp_path, monkeypatch):
    def denied(*args):
        raise PermissionError(13, "Permission denied")  # root may read a file whatever its mode

    path = write(tmp_path, encoded(GOOD))
    monkeypatch.setattr("qwen35.headers._open", denied)
    with pytest.raises(CheckpointError, match=r"cannot be read .*Check the path and permissions"):
        read_header(path)


def test_a_pipe_in_place_of_a_file_is_refused_without_waiting(tmp_path):
    os.mkfifo(tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="no regular file"):
        read_header(tmp_path / "model.safetensors")


def test_a_loop_of_links_is_refused(tmp_path):
    (tmp_path / "model.safetensors").symlink_to(tmp_path / "other")
    (tmp_path / "other").symlink_to(tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_header(tmp_path / "model.safetensors")


@settings(deadline=None)
@given(header=safetensors_headers())
def test_every_truthful_header_is_read(tmp_path_factory, header):
    content = encoded(header, b"\0" * data_size(header))
    found = read_header(write(tmp_path_factory.mktemp("fuzz"), content))
    assert {name: [h.dtype, list(h.shape)] for name, h in found.items()} == {
        name: [e["dtype"], e["shape"]] for name, e in header.items() if name != "__metadata__"
    }


@settings(deadline=None)
@given(header=safetensors_headers(), cut=st.integers(1, 40))
def test_every_truncation_is_refused(tmp_path_factory, header, cut):
    content = encoded(header, b"\0" * data_size(header))
    path = write(tmp_path_factory.mktemp("fuzz"), content[: max(len(content) - cut, 0)])
    with pytest.raises(CheckpointError):
        read_header(path)


@settings(deadline=None)
@given(content=st.binary(max_size=200))
def test_no_bytes_raise_anything_else(tmp_path_factory, content):
    path = write(tmp_path_factory.mktemp("fuzz"), content)
    with pytest.raises(CheckpointError):
        read_header(path)


def refusal(path):
    try:
        read_header(path)
    except CheckpointError as error:
        return str(error)
    return None


def refused_or_read(path):
    assert (refusal(path) or str(path)).startswith(str(path))


@settings(deadline=None)
@given(value=JSON)
def test_no_json_raises_anything_else(tmp_path_factory, value):
    refused_or_read(write(tmp_path_factory.mktemp("fuzz"), encoded(value)))


@settings(deadline=None)
@given(field=st.sampled_from(["dtype", "shape", "data_offsets"]), value=JSON)
def test_no_value_of_a_field_raises_anything_else(tmp_path_factory, field, value):
    refused_or_read(write(tmp_path_factory.mktemp("fuzz"), encoded(changed("a", **{field: value}))))


@settings(deadline=None)
@given(header=safetensors_headers(), data=st.data())
def test_no_damage_to_a_good_file_raises_anything_else(tmp_path_factory, header, data):
    content = bytearray(encoded(header, b"\0" * data_size(header)))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(content) - 1))
        content[at] = data.draw(st.integers(0, 255))
    content = content[: data.draw(st.integers(0, len(content)))]
    refused_or_read(write(tmp_path_factory.mktemp("fuzz"), bytes(content)))


def folder(tmp_path, shards, index=None, config="{}"):
    for name, tensors in shards.items():
        save_file(tensors, tmp_path / name)
    if index is not None:
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    return tmp_path


ONE = {"x": np.zeros(2, np.float32)}
TWO = {"y": np.zeros(3, np.float32)}
SHARDS = {"model-1.safetensors": ONE, "model-2.safetensors": TWO}
INDEX = {"x": "model-1.safetensors", "y": "model-2.safetensors"}


def test_shards_with_an_index_are_read_as_one(tmp_path):
    assert set(open_checkpoint(folder(tmp_path, SHARDS, INDEX)).tensors) == {"x", "y"}


@pytest.mark.parametrize(
    ("shards", "index", "config", "message"),
    [
        (SHARDS, INDEX, None, "config.json: cannot be read"),
        (SHARDS, INDEX, "[]", "config.json: the file is no JSON object"),
        (SHARDS, INDEX, "{", "config.json: the file is no JSON"),
        (SHARDS, INDEX, '{"a": 1, "a": 2}', "config.json: the file has the key 'a' twice"),
        (SHARDS, INDEX, "[" * 200_000, "config.json: .*nested too deeply"),
        ({}, None, "{}", "has no model"),
        (SHARDS, INDEX | {"z": "model-1.safetensors"}, "{}", "model-1.safetensors: lacks .*'z'"),
        (SHARDS, INDEX | {"z": "model-3.safetensors"}, "{}", "names 'model-3.safetensors', which"),
        ({}, INDEX, "{}", "names 'model-1.safetensors', which is not there"),
        (SHARDS, INDEX | {"z": "model" + "3" * 300}, "{}", "which is not there"),
        (SHARDS, INDEX | {"z": "../model-1.safetensors"}, "{}", "outside the folder"),
        (SHARDS, INDEX | {"z": "/model-1.safetensors"}, "{}", "outside the folder"),
        (SHARDS, INDEX | {"z": ".."}, "{}", "outside the folder"),
        (
            SHARDS | {"more.safetensors": {"z": ONE["x"]}},
            INDEX | {"z": "more.safetensors"},
            "{}",
            "'more.safetensors': transformers would load it, mlx-lm only model",
        ),
        (SHARDS, {"x": "model-1.safetensors"}, "{}", "does not name 'y', found in model-2"),
        (SHARDS, {"x": 1}, "{}", "no weight_map of file names"),
        (SHARDS | {"model-2.safetensors": ONE}, None, "{}", "'x' is also in model-1.safetensors"),
    ],
)
def test_an_ambiguous_or_incomplete_folder_is_refused(tmp_path, shards, index, config, message):
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(folder(tmp_path, shards, index, config))


@pytest.mark.parametrize("name", ["absent", "long" * 100, "with\0zero"])
def test_an_absent_folder_is_refused(tmp_path, name):
    with pytest.raises(CheckpointError, match=r"is no folder. Give a checkpoint's folder"):
        open_checkpoint(tmp_path / name)


def test_an_index_that_links_nowhere_is_refused(tmp_path):
    place = folder(tmp_path, SHARDS)
    (place / "model.safetensors.index.json").symlink_to(place / "absent")
    with pytest.raises(CheckpointError, match=r"index.json: cannot be read"):
        open_checkpoint(place)


def test_a_config_that_is_a_pipe_is_refused_without_waiting(tmp_path):
    os.mkfifo(folder(tmp_path, SHARDS, config=None) / "config.json")
    with pytest.raises(CheckpointError, match=r"config.json: is no regular file"):
        open_checkpoint(tmp_path)


def test_linked_files_are_read(tmp_path):
    (tmp_path / "blobs").mkdir()
    (tmp_path / "model").mkdir()
    for file in folder(tmp_path / "blobs", SHARDS, INDEX).iterdir():
        (tmp_path / "model" / file.name).symlink_to(Path("..") / "blobs" / file.name)
    assert set(open_checkpoint(tmp_path / "model").tensors) == {"x", "y"}


def test_the_digest_of_a_checkpoint_that_lost_a_file_names_it(tmp_path):
    checkpoint = open_checkpoint(folder(tmp_path, SHARDS))
    (tmp_path / "model-2.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model-2.safetensors: cannot be read"):
        checkpoint.digest()


def test_the_digest_changes_with_a_config_value_and_a_shape(tmp_path):
    def digest(name, shape, config):
        place = tmp_path / name
        place.mkdir()
        tensors = {"x": np.zeros(shape, np.float32)}
        return open_checkpoint(folder(place, {"model.safetensors": tensors}, None, config)).digest()

    digests = {digest("1", 6, "{}"), digest("2", 6, '{"a": 1}'), digest("3", (2, 3), "{}")}
    assert len(digests) == 3
    assert digest("4", 6, "{}") in digests
