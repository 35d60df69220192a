"""Faults of the oracle: it must be named, and must not excuse a candidate with the same fault."""

import pytest
from faults.registry import FAULTS

from parity.runners.transformers import TransformersRunner


@pytest.fixture
def broken(monkeypatch):
    """transformers with a dt_bias of layer 0 that is off by a tenth."""
    real = TransformersRunner.__init__

    def init(self, *args, **options):
        real(self, *args, **options)
        layer = self.model.get_submodule("model.layers.0.linear_attn")
        layer.dt_bias.data += 0.1

    monkeypatch.setattr(TransformersRunner, "__init__", init)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_wrong_oracle_is_named_at_its_place(broken, checkpoints, dtype):
    result = checkpoints.judge("tiny", dtype, "one-shot", oracles=("transformers",))
    first = result["first_divergence"]
    assert (first["tap"], first["wrong"]) == ("layers.0.linear_attn.g", "oracle")
    assert "the oracle's error is" in first["detail"]


def test_a_candidate_with_a_fault_of_its_own_is_wrong_too(broken, checkpoints, monkeypatch):
    FAULTS["recurrence: decay left out"].patch(monkeypatch)
    result = checkpoints.judge("tiny", "float32", "one-shot", oracles=("transformers",))
    assert result["first_divergence"]["wrong"] == "both"
