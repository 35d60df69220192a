"""Faults of the loading plan: the maps that are drawn must show each against mlx-lm's sanitize."""

import inspect
import sys
import types

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from sanitized import same_as_mlx_lm
from strategies import name_maps

from qwen35 import plan

FAULTS = {
    "k_norm lost": ('    ".k_norm.weight",\n', ""),
    "input_layernorm lost": ('    ".input_layernorm.weight",\n', ""),
    "q_norm without its dot": ('".q_norm.weight"', '"q_norm.weight"'),
    "every norm shifted": ('"model.norm.weight"', '".norm.weight"'),
    "vision_tower with a dot": ('"vision_tower",', '"vision_tower.",'),
    "model.visual with a dot": ('"model.visual")', '"model.visual.")'),
    "mtp without its dot": ('if "mtp." in target:', 'if "mtp" in target:'),
    "decided after mtp is dropped": (
        'if "conv1d.weight" in target]',
        'if "conv1d.weight" in target and "mtp." not in target]',
    ),
    "conv weights by their ending": (
        'if "conv1d.weight" in target]',
        'if target.endswith("conv1d.weight")]',
    ),
    "the other conv axis looked at": ("shapes[s][-1:] != (1,)", "shapes[s][1:2] == (1,)"),
    "one occurrence renamed": ('"language_model.model")', '"language_model.model", 1)'),
    "gains of any shape shifted": ("len(shapes[source]) == 1 and", ""),
    "draft heads decide": ('rule == "mlx-lm-0.31" and drafts', "drafts"),
    "the trunk's prefix with a dot": (
        'startswith("model.language_model")',
        'startswith("model.language_model.")',
    ),
    "the root's prefix without a dot": (
        'startswith("language_model.")',
        'startswith("language_model")',
    ),
}


def held_to_mlx_lm(make_plan):
    # As many maps as tests/unit/test_plan.py draws; the first difference is enough.
    @settings(deadline=None, max_examples=400, phases=[Phase.generate], database=None)
    @given(shapes=name_maps(), dtype=st.sampled_from(["float32", "float16", "bfloat16"]))
    def held(shapes, dtype):
        same_as_mlx_lm(make_plan, shapes, dtype)

    held()


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_the_plan_is_seen(fault, monkeypatch):
    text = inspect.getsource(plan)
    right, wrong = FAULTS[fault]
    assert right in text
    edited = types.ModuleType("edited_plan")
    monkeypatch.setitem(sys.modules, "edited_plan", edited)  # where dataclasses look for it
    exec(compile(text.replace(right, wrong), "edited_plan", "exec"), edited.__dict__)
    with pytest.raises(AssertionError):
        held_to_mlx_lm(edited.make_plan)
