"""Programs catch faults of state and name their place: the first moment and state that differ."""

import numpy as np
import pytest
from faults.fault_programs import (
    DECODE,
    FAULTS,
    PROMPT,
    RECORD_KEPT,
    UNMASKED_CONV,
    VERIFY,
    WRITES_IN_PLACE,
    accept,
)
from program_claims import (
    Candidate,
    claim_a_snapshot_stays,
    claim_all_kept_is_a_commit,
    claim_it_equals_its_tokens_alone,
    claim_padding_on_the_left_is_none,
    first_difference,
    place,
)


@pytest.mark.parametrize("name", FAULTS)
def test_a_program_of_at_most_four_steps_catches_it_and_names_its_place(name, monkeypatch):
    fault = FAULTS[name]
    assert len(fault.steps) <= 4
    claim_it_equals_its_tokens_alone(Candidate(), fault.steps)
    fault.patch(monkeypatch)
    assert place(first_difference(Candidate(), fault.steps)) == (fault.moment, fault.tap)


CLAIMS = {
    "mask ignored in the convolution": (
        UNMASKED_CONV,
        lambda: claim_padding_on_the_left_is_none(
            Candidate(), [[1, 2, 3, 4, 5], [6, 7, 8, 9, 10]], [5, 2]
        ),
        r"\(0, 'layers\.0\.linear_attn\.conv_tail'\)",
    ),
    "record kept after commit": (
        RECORD_KEPT,
        lambda: claim_all_kept_is_a_commit(Candidate(), [PROMPT], np.array(VERIFY["ids"])),
        "layer 0 holds a record",
    ),
    "forwards write what a snapshot holds": (
        WRITES_IN_PLACE,
        lambda: claim_a_snapshot_stays(Candidate(), [PROMPT, DECODE, VERIFY, accept(1)]),
        "snapshot after moment 0",
    ),
}


@pytest.mark.parametrize("name", CLAIMS)
def test_a_claim_of_its_own_catches_it(name, monkeypatch):
    patch, claim, message = CLAIMS[name]
    claim()
    patch(monkeypatch)
    with pytest.raises(AssertionError, match=message):
        claim()
