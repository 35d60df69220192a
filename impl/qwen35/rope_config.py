"""RoPE's entries in config.json: which there may be, and that no two of them disagree."""

import reprlib
from collections.abc import Callable
from typing import Any

Section = dict[str, Any]
Fail = Callable[[str, str], Exception]

ENTRIES = ("rope_parameters", "rope_scaling")
UNDERSTOOD = {"rope_type", "type", "rope_theta", "partial_rotary_factor"} | {
    *("mrope_section", "mrope_interleaved")  # of no effect on text, whose positions are all equal
}
_FLAT = ("rope_theta", "partial_rotary_factor")
_DEFAULT_FACTOR = 0.25  # mlx-lm's and transformers'; their defaults of rope_theta differ


def read_rope(text: Section, outer: Section, place: str, fail: Fail) -> dict[str, Any]:
    """Return `partial_rotary_factor`, and `rope_theta` where the text section gives one.

    They stand in rope_parameters (older: rope_scaling), else in the text section itself, where
    transformers finds them, and mlx-lm only if rope_parameters is null. `place` is the text
    section's prefix. Raises what `fail(problem, remedy)` returns.
    """
    for prefix, section in ((place, text), ("", outer)):
        for name in ENTRIES:
            _check_type(prefix + name, section.get(name), fail)
    parameters, scaling = (text.get(name) or {} for name in ENTRIES)
    if parameters and scaling and _spelt(parameters) != _spelt(scaling):
        raise fail(
            f"{place}rope_scaling says otherwise than rope_parameters: transformers reads the "
            "first, mlx-lm only the second",
            "Remove rope_scaling, or make them equal",
        )
    name, chosen = (ENTRIES[0], parameters) if parameters else (ENTRIES[1], scaling)
    values: dict[str, Any] = {"partial_rotary_factor": _DEFAULT_FACTOR}
    for key in _FLAT:
        flat = text.get(key)
        if flat is not None and chosen.get(key, flat) != flat:
            raise fail(
                f"{place}{key} is {reprlib.repr(flat)}, {place}{name}.{key} "
                f"{reprlib.repr(chosen[key])}",
                "Remove the first, or make them equal",
            )
        if flat is not None or key in chosen:
            values[key] = chosen.get(key, flat)
    return values


def _check_type(name: str, entry: Any, fail: Fail) -> None:
    if entry is None:
        return
    if not isinstance(entry, dict):
        raise fail(f"{name} is no JSON object", "Copy the original config.json")
    for key in ("rope_type", "type"):  # mlx-lm's conversion writes the second
        if (kind := entry.get(key, "default")) != "default":
            raise fail(
                f"{name}.{key} is {reprlib.repr(kind)}, which is not implemented",
                "Give a checkpoint whose type is 'default', or write that if it is meant",
            )
    if nested := [key for key, value in entry.items() if isinstance(value, dict)]:
        raise fail(
            f"{name}.{reprlib.repr(nested[0])[1:-1]} is a section of its own, which is not "
            "implemented",
            "Give one set of values for all layers",
        )


def _spelt(entry: Section) -> Section:
    """Return the entry with its type under one name."""
    return {"rope_type": "default"} | {k: v for k, v in entry.items() if k != "type"}
