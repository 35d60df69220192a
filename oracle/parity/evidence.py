"""What the norm gains' own values say: stored as γ (near 1), as γ−1 (near 0), or shifted twice.

Of each gain the first SAMPLE values are read, a few hundred bytes. The layers' two norms decide;
q_norm, k_norm and the final norm are reported but may lie anywhere in real models, and
linear_attn.norm is γ in both generations, so it is a control.
"""

import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any, BinaryIO

from parity.shown import shown
from qwen35.errors import CheckpointError
from qwen35.headers import TensorHeader
from qwen35.plan import SHIFTED

SAMPLE = 256
"""Values read of each gain, at most."""
KINDS = {
    "input_layernorm": ".input_layernorm.weight",
    "post_attention_layernorm": ".post_attention_layernorm.weight",
    "q_norm": ".q_norm.weight",
    "k_norm": ".k_norm.weight",
    "norm": "model.norm.weight",
}
"""Kind -> the ending of canonical names; all of them are shifted."""
CONTROL = ".linear_attn.norm.weight"
DECIDING = ("input_layernorm", "post_attention_layernorm")
THRESHOLDS = (
    "γ−1: mean at most 0.35, with 5 % of the values or more below 0 (or all 0); γ: mean 0.6 to "
    "1.5, with fewer; γ+1: mean 1.6 to 2.6, with fewer; all by the median over the layers' two "
    "norms; mixed: two or more, and over 1 in 32, clearly say another than the median"
)
_MINORITY = 1 / 32  # one shard of many is noticed, one odd layer is not
_FORMATS = {"F16": "e", "F32": "f", "F64": "d"}

assert set(KINDS.values()) == set(SHIFTED)


@dataclass(frozen=True)
class Gain:
    """What was read of one gain."""

    name: str
    kind: str
    mean: float
    negative: float
    """The share of values below 0."""
    zero: bool
    """Whether every value is 0, as in a sparse file."""

    @property
    def says(self) -> str:
        """γ, γ−1, γ+1 or unclear."""
        return _says(self.mean, self.negative)


@dataclass(frozen=True)
class Evidence:
    """What the values say, and the readings it rests on."""

    says: str
    because: str
    mean_gain: float | None
    gains: tuple[Gain, ...] = ()
    values: int = 0

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        kinds = {}
        for kind in (*KINDS, "control"):
            means = [gain.mean for gain in self.gains if gain.kind == kind]
            if means:
                kinds[kind] = {"tensors": len(means), "mean": fmean(means)} | {
                    "lowest": min(means),
                    "highest": max(means),
                }
        return {
            "says": self.says,
            "because": self.because,
            "mean_gain": self.mean_gain,
            "kinds": kinds,
            "tensors": [gain.name for gain in self.gains],
            "values_read": self.values,
            "thresholds": THRESHOLDS,
        }


NOT_READ = Evidence("not read", "no values were asked for", None)


def read_evidence(tensors: Mapping[str, TensorHeader], targets: Mapping[str, str]) -> Evidence:
    """Read the gains among `targets` (stored name -> canonical name) and judge them."""
    wanted = []
    for name, target in targets.items():
        kind = "control" if target.endswith(CONTROL) else kind_of(target)
        if kind and len(tensors[name].shape) == 1:
            wanted.append((tensors[name], kind))
    gains, values = [], 0
    for header, kind, read in _read(wanted):
        values += len(read)
        gains.append(
            Gain(
                header.name, kind, fmean(read), sum(v < 0 for v in read) / len(read), not any(read)
            )
        )
    return judge(gains, values)


def kind_of(target: str) -> str | None:
    """Return a gain's kind by its canonical name, None for any other tensor."""
    return next((kind for kind, ending in KINDS.items() if target.endswith(ending)), None)


def judge(gains: Iterable[Gain], values: int = 0) -> Evidence:
    """Say what the readings amount to."""
    gains = tuple(gains)
    deciding = [gain for gain in gains if gain.kind in DECIDING]
    if not deciding:
        return Evidence("unclear", "no layer norm could be read", None, gains, values)
    mean = median(gain.mean for gain in deciding)
    if all(gain.zero for gain in gains if gain.kind == "control" or gain in deciding):
        why = "every value is 0, as in a file that holds headers alone"
        return Evidence("unclear", why, mean, gains, values)
    says = _says(mean, median(gain.negative for gain in deciding))
    others = [gain for gain in deciding if gain.says not in (says, "unclear")]
    if says != "unclear" and len(others) > max(1, _MINORITY * len(deciding)):
        why = (
            f"{len(others)} of {len(deciding)} layer norms say {others[0].says}, the others {says}"
        )
        return Evidence("mixed", f"{why}: {shown(others[0].name)} first", mean, gains, values)
    why = f"the mean of {len(deciding)} layer norms is {mean:.3g} (median), which says {says}"
    return Evidence(says, why, mean, gains, values)


def _says(mean: float, negative: float) -> str:
    if mean <= 0.35 and (negative >= 0.05 or mean == 0):  # a fresh γ−1 is 0 everywhere
        return "γ−1"
    if 0.6 <= mean <= 1.5 and negative < 0.05:
        return "γ"
    if 1.6 <= mean <= 2.6 and negative < 0.05:
        return "γ+1"
    return "unclear"


def _read(
    wanted: list[tuple[TensorHeader, str]],
) -> Iterable[tuple[TensorHeader, str, list[float]]]:
    by_file: dict[Path, list[tuple[TensorHeader, str]]] = {}
    for header, kind in wanted:
        by_file.setdefault(header.file, []).append((header, kind))
    for file, headers in by_file.items():
        try:
            with open(file, "rb") as stream:
                for header, kind in sorted(headers, key=lambda pair: pair[0].start):
                    if values := first_values(stream, header, SAMPLE):
                        yield header, kind, values
        except OSError as error:
            raise CheckpointError(
                file, f"cannot be read ({error.strerror or error})", "Check the disk and the file"
            ) from None


def first_values(stream: BinaryIO, header: TensorHeader, count: int) -> list[float]:
    """Return the first values of a tensor that are finite; none for a dtype that is no float."""
    count = min(count, *header.shape)
    if header.dtype != "BF16" and header.dtype not in _FORMATS:
        return []
    width = {"BF16": 2, "F16": 2, "F32": 4, "F64": 8}[header.dtype]
    stream.seek(header.start)
    data = stream.read(count * width)
    count = len(data) // width
    data = data[: count * width]
    if header.dtype == "BF16":  # the upper half of a float32
        halves = struct.unpack(f"<{count}H", data)
        data = struct.pack(f"<{count}I", *(half << 16 for half in halves))
    values = struct.unpack(f"<{count}{_FORMATS.get(header.dtype, 'f')}", data)
    return [value for value in values if abs(value) < 1e30]
