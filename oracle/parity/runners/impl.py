"""The runner for this project's own implementation."""

import mlx.core as mx
import numpy as np

from parity.program import Program
from parity.runners.impl_states import impl_states
from parity.runners.mlx_arrays import record, recorder, run_info
from parity.states import States
from parity.trace import Feed, Trace
from qwen35.headers import Checkpoint
from qwen35.load import load
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
        """See Runner; of even programs alone."""
        config = self.model.config
        program.check_vocabulary(config.vocab_size)
        trace = Trace(self.name, config.layer_types, run_info(self.dtype))
        cache = self.model.make_cache()
        chosen = program.chosen_rows()
        for forward, (_, _, ids) in enumerate(program.forwards()):
            if (rows := chosen[forward]) is not None:
                cache.filter(rows)
            taken: dict[str, mx.array] = {}
            tap = recorder(taken, forward, feed, getattr(mx, self.dtype))
            self.model(mx.array(ids.astype(np.int32)), cache, tap)
            record(trace, forward, taken)
        return trace

    def states(self, program: Program) -> States:
        """See StatefulRunner."""
        return impl_states(self.model, self.dtype, program)
