"""`append-only`: the candidate itself on each row's tokens alone, as if nothing but appending was.

Rollback, padding, other rows, and what was done to the cache must leave no trace: whatever a
program did, a row's states are due to be those of its tokens run alone, at once, from an empty
cache.
"""

import numpy as np

from parity.histories import Tokens, histories
from parity.program import Program
from parity.runners.base import StatefulRunner
from parity.states import LOGITS, RowStates, States
from parity.steps import Step

APPEND_ONLY = "append-only"


class AppendOnly:
    """Gives the states that a program is due to leave; each different history is run once."""

    name = APPEND_ONLY

    def __init__(self, candidate: StatefulRunner) -> None:
        self.candidate = candidate
        self._known: dict[Tokens, RowStates] = {}
        self._layer_types: tuple[str, ...] = ()

    def states(self, program: Program) -> States:
        """Return the states of every row after every moment."""
        moments = []
        for moment, rows in zip(program.moments(), histories(program), strict=True):
            had = moment.tokens.tolist() if moment.is_forward else [0] * len(rows)
            moments.append(
                [self._alone(tokens, n > 0) for tokens, n in zip(rows, had, strict=True)]
            )
        return States(APPEND_ONLY, self._layer_types, {"runs": self.candidate.name}, moments)

    def _alone(self, tokens: Tokens, with_logits: bool) -> RowStates:
        if tokens not in self._known:
            self._known[tokens] = self._run(tokens) if tokens else self._nothing()
        known = self._known[tokens]
        return {name: x for name, x in known.items() if with_logits or name != LOGITS}

    def _run(self, tokens: Tokens) -> RowStates:
        states = self.candidate.states(Program((Step("prefill", np.array([tokens])),)))
        self._layer_types = states.layer_types
        return states.moments[-1][0]

    def _nothing(self) -> RowStates:
        """The states of an empty cache: zeros of the shapes that one token leaves."""
        nothing = {}
        for name, one in self._run((0,)).items():
            held = one[:, :0] if name.endswith(("self_attn.keys", "self_attn.values")) else one
            nothing[name] = np.zeros_like(held)
        return nothing
