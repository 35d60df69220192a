"""Between MLX and NumPy without rounding, and what is to be recorded of an MLX run."""

import importlib.metadata
import os
import platform
from collections.abc import Callable, Mapping
from typing import Any

import ml_dtypes
import mlx.core as mx
import numpy as np

from parity.taps import split
from parity.trace import Feed, Trace

SWITCHES = ("MLX_ENABLE_TF32", "MLX_GDN_PACKED", "MLX_DISABLE_COMPILE")
"""Environment variables that change what MLX or mlx-lm computes."""


def to_numpy(value: mx.array) -> np.ndarray:
    """Return a view of an evaluated array; bfloat16 stays bfloat16."""
    if value.dtype == mx.bfloat16:
        return np.asarray(value.view(mx.uint16)).view(ml_dtypes.bfloat16)
    return np.asarray(value)


def from_numpy(value: np.ndarray, dtype: mx.Dtype) -> mx.array:
    """Return an MLX array of `dtype`."""
    return mx.array(value).astype(dtype)


def run_info(dtype: str, environ: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Return the versions, device and precision switches a trace has to name."""
    return {
        "mlx": importlib.metadata.version("mlx"),
        "device": device_key(),
        "dtype": dtype,
        "switches": {name: environ.get(name) for name in SWITCHES},
    }


def device_key() -> str:
    """Return `cpu-x86_64`, `cpu-arm64`, `metal-<architecture>` or `cuda-sm_<n>`."""
    machine = {"AMD64": "x86_64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())
    if mx.default_device().type == mx.cpu:
        return f"cpu-{machine}"
    architecture = str(mx.device_info().get("architecture", "unknown"))
    return f"{'metal' if mx.metal.is_available() else 'cuda'}-{architecture}"


def recorder(
    taken: dict[str, mx.array], forward: int, feed: Feed | None, dtype: mx.Dtype
) -> Callable[[str, mx.array], mx.array]:
    """Return a tap that keeps every tensor in `taken` and passes on what `feed` says."""

    def tap(name: str, value: mx.array) -> mx.array:
        taken[name] = value
        if feed is None:
            return value
        layer, short = split(name)
        if short == "embed_tokens":
            return from_numpy(feed(forward, 0), dtype)
        if short == "output" and layer is not None:
            return from_numpy(feed(forward, layer + 1), dtype)
        return value

    return tap


def record(trace: Trace, forward: int, taken: dict[str, mx.array]) -> None:
    """Evaluate what a forward's taps took, and add it to the trace."""
    mx.eval(list(taken.values()))
    for name, value in taken.items():
        trace.add(forward, name, to_numpy(value))
