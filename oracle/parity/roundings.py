"""What rounding alone can do to a program: the scale by which errors are judged.

How far one rounding error is carried depends on the input: where y is near zero the gated norm
scales it up, where a query meets two like keys the softmax does. One runtime's own error is a
single draw from that and often a lucky one. So the float64 reference runs the program again with
every tap rounded to the dtype it is computed in, on several grids of floats: round(x·c)/c, with c
spread evenly over an octave, so that the errors differ and are of the same size.
"""

from collections.abc import Sequence

import numpy as np

from parity.bits import by_name, is_float
from parity.program import Program
from parity.reference import ReferenceRunner
from parity.steps import Step
from parity.taps import Tap, order
from parity.trace import Feed, Trace

GRIDS: tuple[float, ...] = tuple(2.0 ** (i / 6) for i in range(6))
"""The factors c."""


class Roundings(Trace):
    """Takes a rounded run's taps and keeps only their errors from the truth, grid by grid.

    `vectors[forward, tap]` [grids, vectors] holds the relative error of each vector along the last
    axis, `rms[forward, tap]` [grids] that of the whole tensor.
    """

    def __init__(self, truth: Trace, dtype: str, grids: Sequence[float] = GRIDS) -> None:
        super().__init__("roundings", truth.layer_types)
        self.vectors: dict[tuple[int, str], np.ndarray] = {}
        self.rms: dict[tuple[int, str], np.ndarray] = {}
        self._truth, self._dtype, self._grids = truth, dtype, np.array(grids)
        self._taps: dict[str, tuple[int, Tap]] = order(truth.layer_types)

    def add(self, forward: int, tap: str, value: np.ndarray) -> np.ndarray:
        """Return the value [grids·B, ...] rounded, each grid's rows on their own grid."""
        exact = self._truth.tensors[forward, tap]
        kept = self._taps[tap][1].dtype
        dtype = by_name(self._dtype if kept == "working" else kept)
        if not is_float(dtype):
            return value
        rows = value.reshape(len(self._grids), *exact.shape)
        grid = self._grids.reshape(-1, *[1] * exact.ndim)
        with np.errstate(over="ignore"):  # an infinity is what the dtype makes of it
            rounded = (rows * grid).astype(dtype).astype(np.float64) / grid
        error = rounded - exact
        errors = np.einsum("...i,...i->...", error, error).reshape(len(self._grids), -1)
        scales = np.einsum("...i,...i->...", exact, exact).ravel()
        self.vectors[forward, tap] = _root(errors, scales)
        self.rms[forward, tap] = _root(errors.sum(axis=1), scales.sum())
        return rounded.reshape(value.shape)


def roundings(
    reference: ReferenceRunner, program: Program, truth: Trace, feed: Feed | None = None
) -> Roundings:
    """Run the program with rounded taps; `truth` is the same reference's exact run of it."""
    times, rows = len(GRIDS), program.rows
    steps = []
    for step in program.steps:
        if step.chosen is None:
            steps.append(Step(step.op, np.tile(step.ids, (times, 1)), step.chunk))
        else:
            each = [grid * rows + row for grid in range(times) for row in step.chosen]
            steps.append(Step("filter", rows=tuple(each)))
            rows = len(step.chosen)
    found = Roundings(truth, reference.dtype)

    def tiled(forward: int, layer: int) -> np.ndarray:
        assert feed is not None
        return np.tile(feed(forward, layer), (times, 1, 1))

    reference.run(Program(tuple(steps)), feed and tiled, found)
    return found


def _root(errors: np.ndarray, scales: np.ndarray) -> np.ndarray:
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(errors == 0.0, 0.0, np.sqrt(errors / scales))
