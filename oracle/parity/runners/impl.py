"""The runner for this project's own implementation."""

from collections.abc import Callable

import mlx.core as mx
import numpy as np

from parity.program import Program
from parity.runners.mlx_arrays import from_numpy, run_info, to_numpy
from parity.taps import split
from parity.trace import Feed, Trace
from qwen35.headers import Checkpoint
from qwen35.load import DTYPES, load
from qwen35.semantics import Semantics


class ImplRunner:
    """Runs `qwen35`; its taps already carry the canonical names and layouts."""

    name = "impl"

    def __init__(
        self,
        checkpoint: Checkpoint,
        dtype: str,
        semantics: Semantics = Semantics(),  # noqa: B008 - frozen
    ) -> None:
        self.dtype = dtype
        self.model = load(checkpoint, dtype, semantics)

    def run(self, program: Program, feed: Feed | None = None) -> Trace:
        """See Runner."""
        config = self.model.config
        program.check_vocabulary(config.vocab_size)
        trace = Trace(self.name, config.layer_types, run_info(self.dtype))
        cache = self.model.make_cache()
        for forward, (_, _, ids) in enumerate(program.forwards()):
            taken: dict[str, mx.array] = {}
            tap = recorder(taken, forward, feed, DTYPES[self.dtype])
            self.model(mx.array(ids.astype(np.int32)), cache, tap)
            record(trace, forward, taken)
        return trace


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
