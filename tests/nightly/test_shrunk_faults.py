"""Drawn programs find every fault of state, and shrink to few steps."""

import pytest
from faults.fault_programs import FAULTS
from hypothesis import HealthCheck, Phase, find, settings
from program_claims import Candidate, first_difference
from program_strategies import programs

SEARCH = settings(
    max_examples=500,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.generate, Phase.shrink],
    suppress_health_check=list(HealthCheck),
)


@pytest.mark.nightly
@pytest.mark.parametrize("name", FAULTS)
def test_drawn_programs_catch_it_and_shrink_to_at_most_four_steps(name, monkeypatch):
    FAULTS[name].patch(monkeypatch)
    caught = lambda steps: first_difference(Candidate(), steps) is not None
    assert len(find(programs(), caught, settings=SEARCH)) <= 4
