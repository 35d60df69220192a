"""What is claimed of the implementation on any program: by properties, and caught for faults."""

from dataclasses import dataclass
from typing import Any, ClassVar

from tiny_models import tiny_model

from parity import policy
from parity.compare import Comparison
from parity.program import Program, parse
from parity.runners.append_only import AppendOnly
from parity.runners.impl_states import impl_states
from parity.states import States, compare_states
from qwen35.model import Model

RULES = {
    dtype: policy.load().pair("impl", "append-only", dtype)
    for dtype in ("float32", "float16", "bfloat16")
}


SIZES = {
    "hidden_size": 44,
    "num_attention_heads": 14,
    "num_key_value_heads": 7,
    "linear_num_key_heads": 5,
    "linear_num_value_heads": 15,
}
"""With the other sizes of tiny_models no two are alike, nor like the 1, 2 or 4 rows drawn."""

QK_SCALES = {1.0: 0.75, 1e-3: 1.0e-3, 1e-4: 1.0e-4}
"""Length of the vectors q and k of a head, before they are normalized -> scale of its weights."""


@dataclass(frozen=True)
class Candidate:
    """The implementation on a small random model; `sizes` are those that differ from SIZES."""

    dtype: str = "float32"
    qk_length: float = 1.0
    sizes: tuple[tuple[str, int], ...] = ()
    name: ClassVar[str] = "impl"

    @property
    def model(self) -> Model:
        return tiny_model(self.dtype, QK_SCALES[self.qk_length], **(SIZES | dict(self.sizes)))

    def states(self, program: Program) -> States:
        return impl_states(self.model, self.dtype, program)


def program(steps: list[dict[str, Any]]) -> Program:
    return parse({"schema": 1, "steps": steps})


def first_difference(candidate: Candidate, steps: list[dict[str, Any]]) -> Comparison | None:
    """Run the program and its tokens alone; return the first state that differs."""
    asked = program(steps)
    return difference(candidate.states(asked), AppendOnly(candidate).states(asked), candidate.dtype)


def difference(ours: States, theirs: States, dtype: str = "float32") -> Comparison | None:
    """Return the first state of two runs that differs."""
    found = compare_states(ours, theirs, RULES[dtype], ours.layer_types)
    assert found
    return next((c for c in found if c.failed), None)


def place(item: Comparison | None) -> tuple[int, str] | None:
    """Return (moment, name) of a difference."""
    return item and (item.forward, item.tap)


def claim_it_equals_its_tokens_alone(candidate: Candidate, steps: list[dict[str, Any]]) -> None:
    seen = first_difference(candidate, steps)
    assert seen is None, f"moment {seen.forward} {seen.tap} {seen.verdict}: {seen.detail}"
