"""Drawn programs find every fault of state, and shrink to few steps."""

import pytest
from faults.fault_programs import FAULTS
from hypothesis import HealthCheck, Phase, find, settings
from program_claims import Candidate, first_difference, program
from program_strategies import programs

from parity.program import ProgramError

SEARCH = settings(
    max_examples=500,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.generate, Phase.shrink],
    suppress_health_check=list(HealthCheck),
)


def shortened(steps, is_caught):
    """Leave out steps, one or two neighbours at a time, as long as the rest is a program."""
    for width in (1, 2):
        for at in range(len(steps) - width + 1):
            rest = steps[:at] + steps[at + width :]
            if is_program(rest) and is_caught(rest):
                return shortened(rest, is_caught)
    return steps


def is_program(steps):
    try:
        program(steps)
    except ProgramError:
        return False
    return True


@pytest.mark.nightly
@pytest.mark.parametrize("name", FAULTS)
def test_drawn_programs_catch_it_and_shrink_to_at_most_four_steps(name, monkeypatch):
    FAULTS[name].patch(monkeypatch)
    caught = lambda steps: first_difference(Candidate(), steps) is not None
    found = find(programs(), caught, settings=SEARCH)
    assert len(shortened(found, caught)) <= 4
