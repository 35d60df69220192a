"""The model's version-dependent choices, as one value with named presets."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Semantics:
    """What published versions of mlx-lm decided differently.

    `shift_rule` names the rule of `qwen35.plan` that decides whether norm gains are stored as γ−1.
    `qk_eps` says what 1e-6 is added to when q and k are normalized: the mean of their squares
    (mlx-lm up to 0.31.3) or the sum (0.32.0 on, and transformers).
    """

    shift_rule: Literal["mlx-lm-0.31", "mlx-lm-0.32"] = "mlx-lm-0.32"
    qk_eps: Literal["mean", "sum"] = "sum"


PRESETS = {
    "mlx-lm-0.31": Semantics("mlx-lm-0.31", "mean"),
    "mlx-lm-0.32": Semantics("mlx-lm-0.32", "sum"),
}
"""Preset name -> semantics; `mlx-lm-0.32` is the default everywhere."""
