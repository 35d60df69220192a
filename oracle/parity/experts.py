"""The names of a mixture of experts, in mlx-lm's form and in transformers'.

A sparse layer differs from a dense one in its `mlp` alone: a router, experts that are stacked, and
one shared expert with a gate.
"""

import re
from collections.abc import Iterable
from typing import Any

from qwen35.plan import Shapes

_MOE = ("qwen3_5_moe", "qwen3_5_moe_text")
_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
_SHARED = ("gate", *(f"shared_expert.{p}" for p in _PROJECTIONS), "shared_expert_gate")
_DENSE = re.compile(r"(.*\.mlp\.)(?:gate|up|down)_proj\.weight")
_STACKED = re.compile(r"(.*\.mlp\.)experts\.(gate_up_proj|down_proj)")
_SINGLE = re.compile(r"(.*\.mlp\.experts\.)\d+\.(gate|up|down)_proj\.weight")


def is_mixture(config: dict[str, Any]) -> bool:
    """Return whether a config.json is a mixture of experts'."""
    return config.get("model_type") in _MOE


def dense(config: dict[str, Any]) -> dict[str, Any]:
    """Return the config of a dense model that has the same layers but for their mlp."""
    inner = config.get("text_config", config)
    inner = {k: v for k, v in inner.items() if k != "num_experts"}
    inner |= {"model_type": "qwen3_5_text", "intermediate_size": 1}
    if "text_config" not in config:
        return inner
    return config | {"model_type": "qwen3_5", "text_config": inner}


def sparse(canonical: Shapes) -> dict[str, tuple[int, ...]]:
    """Return the canonical names with mlx-lm's experts; shapes stand for `is a matrix` alone."""
    names: dict[str, tuple[int, ...]] = {}
    for name, shape in canonical.items():
        if match := _DENSE.fullmatch(name):
            own = (*_SHARED, *(f"switch_mlp.{p}" for p in _PROJECTIONS))
            names |= {f"{match[1]}{part}.weight": (1, 1) for part in own}
        else:
            names[name] = shape
    return names


def split(names: Iterable[str]) -> set[str]:
    """Return what mlx-lm makes of stacked experts: gate and up apart, if both stacks are there."""
    found = set(names)
    for name in tuple(found):
        match = _STACKED.fullmatch(name)
        if match and match[2] == "gate_up_proj":
            down = f"{match[1]}experts.down_proj"
            if down in found:
                found -= {name, down}
                found |= {f"{match[1]}switch_mlp.{p}.weight" for p in _PROJECTIONS}
    return found


def stacked(names: Iterable[str]) -> set[str]:
    """Return transformers' names: it stacks experts, whether mlx-lm's or single ones are given."""
    found = set()
    for name in names:
        if match := _SINGLE.fullmatch(name):
            name = match[1] + ("down_proj" if match[2] == "down" else "gate_up_proj")
        elif ".mlp.switch_mlp." in name:
            stem, _, part = name.removesuffix(".weight").partition("switch_mlp.")
            name = f"{stem}experts." + ("down_proj" if part == "down_proj" else "gate_up_proj")
        found.add(name)
    return found
