"""What the installed mlx-lm's own sanitize makes of names and values, and a plan held to it."""

from collections.abc import Callable, Mapping
from types import SimpleNamespace

import mlx.core as mx
import numpy as np
from mlx_lm.models import qwen3_5

from parity.runners.mlx_arrays import to_numpy
from qwen35.plan import Plan


def mlx_lm_sanitize(weights: dict[str, mx.array], tied: bool) -> dict[str, mx.array]:
    """Return what mlx-lm loads of a checkpoint's tensors."""
    inner = SimpleNamespace(args=SimpleNamespace(tie_word_embeddings=tied))
    inner.sanitize = lambda w: qwen3_5.TextModel.sanitize(inner, w)
    return qwen3_5.Model.sanitize(SimpleNamespace(language_model=inner), weights)


def same_as_mlx_lm(
    make_plan: Callable[..., Plan], shapes: Mapping[str, tuple[int, ...]], dtype: str
) -> None:
    """Assert that a plan gives mlx-lm's names, in its order, and its values bit for bit."""
    weights = {
        name: mx.array(np.random.default_rng(len(name)).normal(0, 0.3, shape), getattr(mx, dtype))
        for name, shape in shapes.items()
    }
    theirs = mlx_lm_sanitize(dict(weights), tied=False)
    ours = {}
    for entry in make_plan(shapes, tied=False).entries:
        value = weights[entry.source]
        value = value.moveaxis(2, 1) if entry.move_conv else value
        ours[entry.target] = value + 1.0 if entry.add_one else value
    assert list(ours) == list(theirs)
    for name, value in ours.items():
        assert (value.dtype, value.shape) == (theirs[name].dtype, theirs[name].shape)
        assert to_numpy(value).tobytes() == to_numpy(theirs[name]).tobytes()
