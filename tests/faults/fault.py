"""What a fault is, and what makers of patches share."""

from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx
import pytest

import qwen35.load

L, A = "linear_attn.", "self_attn."
FULL = "layers.3."
"""The first full-attention layer of `tiny`; that of `tiny-k3` is layer 1."""
ONE_SHOT = ("tiny", "float32", "one-shot")
CHUNKS = ("tiny", "float32", "chunk-3")
BF16 = ("tiny", "bfloat16", "one-shot")
K3 = ("tiny-k3", "float32", "one-shot")

Patch = Callable[[pytest.MonkeyPatch], None]


@dataclass(frozen=True)
class Fault:
    """`patch(monkeypatch)` makes it; `tap` is the first to differ from mlx-lm, at `step`.

    `transformers_too` says whether transformers' arbitration catches it, at the same place.
    """

    patch: Patch
    tap: str
    case: tuple[str, str, str] = ONE_SHOT
    step: int = 0
    verdict: str = "exceeds"
    transformers_too: bool = True


def patched(owner, name, change):
    """Return a patch that replaces owner.name by change(original)."""
    return lambda mp: mp.setattr(owner, name, change(getattr(owner, name)))


def loaded(change):
    """Return a patch of the plan's application: `change(name, value, entry)` for each tensor."""

    def wrap(apply):
        def applied(plan, checkpoint, dtype=None):
            entries = {entry.target: entry for entry in plan.entries}
            return [(n, change(n, v, entries[n])) for n, v in apply(plan, checkpoint, dtype)]

        return applied

    return patched(qwen35.load, "apply", wrap)


class Namespace:
    """A module with some of its names replaced, for the one module that is given it."""

    def __init__(self, module=mx, **replacements):
        self._module = module
        self.__dict__.update(replacements)

    def __getattr__(self, name):
        return getattr(self._module, name)
