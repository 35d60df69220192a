"""The spread that each kind of parameter has in real models, for synthetic checkpoints."""

import math
from dataclasses import dataclass

ZERO_CENTRED = (
    "input_layernorm.weight",
    "post_attention_layernorm.weight",
    "q_norm.weight",
    "k_norm.weight",
    "model.norm.weight",
    "language_model.norm.weight",
    "mtp.norm.weight",
    "pre_fc_norm_embedding.weight",
    "pre_fc_norm_hidden.weight",
)
"""Endings of the gains that are drawn, and by transformers stored, as γ−1."""
A_LOG_RANGE = (0.5, 8.0)
"""exp(A_log) is uniform here."""
STEP_RANGE = (math.log(1e-3), math.log(1e-1))
"""The log of softplus(dt_bias) is uniform here: decays over many time scales."""
STEP_NOISE = 0.1


@dataclass(frozen=True)
class Normal:
    """A normal distribution."""

    mean: float
    std: float


def normal(name: str, shape: tuple[int, ...]) -> Normal | None:
    """Return what a parameter is drawn from; None for A_log and dt_bias, which have ranges above.

    Names may be of either generation. Raises ValueError for a name that is no parameter's.
    """
    if ".visual." in name or name.startswith("vision_tower."):
        return Normal(0, 0.02)
    if name.endswith((".A_log", ".dt_bias")):
        return None
    if name.endswith(".linear_attn.norm.weight"):
        return Normal(1, 0.1)
    if name.endswith(ZERO_CENTRED):
        return Normal(0, 0.2)
    for ending, std in (
        (".conv1d.weight", 0.5),
        (".embed_tokens.weight", 0.7),
        ("_proj.bias", 0.3),
    ):
        if name.endswith(ending):
            return Normal(0, std)
    if len(shape) != 2:
        raise ValueError(f"{name} {shape}: is no parameter whose spread is known")
    return Normal(0, shape[1] ** -0.5)
