"""Coverage-guided fuzzing of the header reader. Not collected by pytest: `nox -s fuzz`."""

import json
import os
import sys
import tempfile
from pathlib import Path

import atheris

with atheris.instrument_imports():
    from qwen35 import headers
    from qwen35.errors import CheckpointError

PLACE = Path(tempfile.mkdtemp()) / "model.safetensors"
SEEDS = (  # whether the stated length is true, bytes of data, header
    b'\x00\x08{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}',
    b'\x00\x02{"__metadata__":{"format":"mlx"},'
    b'"a":{"dtype":"BF16","shape":[],"data_offsets":[0,2]}}',
    b'\x00\x06{"a":{"dtype":"U8","shape":[2,1],"data_offsets":[4,6]},'
    b'"b":{"dtype":"I16","shape":[2],"data_offsets":[0,4]}}',
    b"\x01\x00\xff\xff\xff\xff\xff\xff\xff\x7f{}",
)
WORDS = ('"dtype"', '"shape"', '"data_offsets"', '"__metadata__"', '"F4"', '"F64"', "[0,8]", "1e9")


def one_input(data: bytes) -> None:
    """Read `data` as a file: it is refused in one line, or all its tensors lie within it."""
    lies, body, text = data[:1] == b"\x01", data[1:2], data[2:]
    length = text[:8] if lies else len(text).to_bytes(8, "little")
    PLACE.write_bytes(length + text[8 * lies :] + b"\0" * int.from_bytes(body, "little"))
    try:
        found = headers.read_header(PLACE)
    except CheckpointError as error:
        said = str(error)
        if not said.startswith(f"{PLACE}: ") or len(said) > 2000:
            raise RuntimeError(f"no short message: {said}") from None
        return
    size = os.path.getsize(PLACE)
    if not all(8 <= tensor.start <= tensor.end <= size for tensor in found.values()):
        raise RuntimeError(f"bytes outside the file: {found}")


if __name__ == "__main__":
    corpus = Path(tempfile.mkdtemp())
    for i, seed in enumerate(SEEDS):
        (corpus / str(i)).write_bytes(seed)
    words = corpus.with_suffix(".dict")
    words.write_text("".join(f"{json.dumps(word)}\n" for word in WORDS))  # quoted and escaped
    atheris.Setup([*sys.argv, f"-dict={words}", str(corpus)], one_input)
    atheris.Fuzz()
