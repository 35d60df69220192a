"""Coverage-guided fuzzing of the header reader. Not collected by pytest; run it by hand:

pip install --group fuzz && python tests/fuzz/fuzz_headers.py -max_total_time=60
"""

import os
import sys
import tempfile
from pathlib import Path

import atheris

with atheris.instrument_imports():
    from qwen35 import headers
    from qwen35.errors import CheckpointError

PLACE = Path(tempfile.mkdtemp()) / "model.safetensors"
SEEDS = (
    b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}',
    b'{"__metadata__":{"format":"mlx"},"a":{"dtype":"BF16","shape":[],"data_offsets":[0,2]}}',
)


def one_input(data: bytes) -> None:
    """Read `data` as a header (its first byte says whether the length before it is true)."""
    source = atheris.FuzzedDataProvider(data)
    lie = source.ConsumeBool()
    length = source.ConsumeInt(8) & (2**64 - 1) if lie else None
    body = source.ConsumeIntInRange(0, 64)
    text = source.ConsumeBytes(1 << 16)
    stated = len(text) if length is None else length
    PLACE.write_bytes(stated.to_bytes(8, "little") + text + b"\0" * body)
    try:
        found = headers.read_header(PLACE)
    except CheckpointError as error:
        assert str(error).startswith(f"{PLACE}: ")  # noqa: PT017 - no pytest here
        assert len(str(error)) < 2000  # noqa: PT017
        return
    size = os.path.getsize(PLACE)
    assert all(8 <= t.start <= t.end <= size for t in found.values())


if __name__ == "__main__":
    corpus = Path(tempfile.mkdtemp())
    for i, seed in enumerate(SEEDS):
        (corpus / str(i)).write_bytes(seed)
    atheris.Setup([*sys.argv, str(corpus)], one_input)
    atheris.Fuzz()
