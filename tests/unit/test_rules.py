"""Each loader's rule, on the name maps of public reports."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import name_maps

from parity.rules import NAMES, RULES, Facts, again
from qwen35.plan import make_plan

CONV = "layers.0.linear_attn.conv1d.weight"
CONVERTED = {
    f"language_model.model.{CONV}": (6, 4, 1),
    "language_model.model.layers.0.input_layernorm.weight": (4,),
    "language_model.model.norm.weight": (4,),
}
EXPORTED = {
    f"model.language_model.{CONV}": (6, 1, 4),
    "model.language_model.layers.0.input_layernorm.weight": (4,),
    "model.language_model.norm.weight": (4,),
}
MTP = {"mtp.norm.weight": (4,)}
OLD = {"mlx-lm-0.31", "mlx-vlm-0.6.5", "mlx-swift-lm-403"}
BY_NAME = {rule.name: rule for rule in RULES}


def answers(shapes, **choices):
    facts = Facts(shapes, **choices)
    return {name: rule.decide(facts).shift for name, rule in BY_NAME.items()}


def test_every_rule_names_its_package_version_and_place():
    for rule in RULES:
        assert rule.name.split("-0")[0].removesuffix("-403") in rule.source or (
            rule.name == "value-mean" and "pull request 1198" in rule.source
        )
        assert any(digit in rule.source for digit in "0123456789")


def test_all_that_can_load_a_conversion_leave_it():
    said = answers(CONVERTED, says="γ", mean=1.0)
    assert said == {name: None if name == "transformers" else False for name in NAMES}


def test_all_add_one_to_an_export():
    assert set(answers(EXPORTED | MTP, says="γ−1", mean=0.0).values()) == {True}


def test_a_kept_draft_head_is_shifted_again_by_the_older_rules_alone():
    said = answers(CONVERTED | MTP, says="γ", mean=1.0)
    assert {name for name, shift in said.items() if shift} == OLD


def test_vision_names_decide_nothing_in_mlx_lm():
    tower = {"vision_tower.blocks.0.norm1.weight": (4,), "vision_tower.conv1d.weight": (2, 1, 3)}
    said = answers(CONVERTED | tower, says="γ", mean=1.0)
    assert not said["mlx-lm-0.31"]
    assert not said["mlx-lm-0.32"]


def test_a_name_that_only_contains_mtp_counts_for_the_older_rules():
    said = answers(CONVERTED | {"language_model.model.xmtp.y": (2,)})
    assert {name for name, shift in said.items() if shift} == OLD


def test_a_kernel_of_one_shows_no_generation():
    shapes = EXPORTED | {f"model.language_model.{CONV}": (6, 1, 1)}
    said = answers(shapes)
    assert said["mlx-lm-0.32"] is False
    assert said["transformers"] is True
    assert said["mlx-vlm"] is True  # it goes by the names


def test_converted_weights_under_export_names_divide_mlx_lm_and_mlx_vlm():
    shapes = EXPORTED | {f"model.language_model.{CONV}": (6, 4, 1)}
    said = answers(shapes)
    assert (said["mlx-lm-0.32"], said["mlx-vlm"], said["transformers"]) == (False, True, None)


def test_mlx_vlm_shifts_a_part_of_mixed_names_and_says_which():
    shapes = CONVERTED | {"model.language_model.layers.1.input_layernorm.weight": (4,)}
    decision = BY_NAME["mlx-vlm"].decide(Facts(shapes))
    assert decision.some
    assert "1 of 3 gains, model.language_model.layers.1.input_layernorm" in decision.because


def test_mlx_vlm_knows_text_names_only_by_a_flat_config():
    shapes = {name.replace("language_model.", ""): shape for name, shape in EXPORTED.items()}
    assert BY_NAME["mlx-vlm"].decide(Facts(shapes)).loads is False
    assert BY_NAME["mlx-vlm"].decide(Facts(shapes, flat=True)).shift is True


@pytest.mark.parametrize("name", ["mlx-lm-0.31", "mlx-lm-0.32", "mlx-vlm"])
def test_a_conv_weight_without_a_kernel_axis_is_loaded_by_none(name):
    shapes = CONVERTED | {f"language_model.model.{CONV}": (6, 4)}
    decision = BY_NAME[name].decide(Facts(shapes))
    assert (decision.loads, decision.shift) == (False, None)
    assert "no kernel axis" in decision.because


@pytest.mark.parametrize(
    ("says", "shift"),
    [("γ", False), ("γ−1", True), ("γ+1", False), ("unclear", None), ("mixed", None)],
)
def test_the_value_rule_goes_by_the_evidence(says, shift):
    assert BY_NAME["value-mean"].decide(Facts({}, says=says, mean=0.5)).shift is shift


@pytest.mark.parametrize("name", [name for name in NAMES if name != "transformers"])
def test_a_conversion_is_loaded_again_without_a_shift(name):
    facts = Facts(EXPORTED | MTP, says="γ−1", mean=0.0)
    assert again(BY_NAME[name], facts).shift is False


@pytest.mark.parametrize("name", NAMES)
def test_a_conversion_that_keeps_its_draft_head_is_shifted_twice_by_the_older_rules(name):
    facts = Facts(EXPORTED | MTP, says="γ−1", mean=0.0)
    if name == "transformers":  # it saves what it read
        assert again(BY_NAME[name], facts, MTP).shift is True
    else:
        assert again(BY_NAME[name], facts, MTP).shift is (name in OLD)


def test_a_conv_weight_with_two_long_axes_is_never_done_with():
    shapes = CONVERTED | {f"language_model.model.{CONV}": (6, 4, 3)}
    assert again(BY_NAME["mlx-lm-0.32"], Facts(shapes)).shift is True


@given(shapes=name_maps(), tied=st.booleans())
def test_every_rule_answers_every_name_map(shapes, tied):
    facts = Facts(shapes, tied)
    for rule in RULES:
        decision = rule.decide(facts)
        assert decision.because
        assert decision.loads or decision.shift is None
        if decision.shift is not None:
            again(rule, facts)


@given(shapes=name_maps())
def test_the_mlx_lm_rules_are_the_plans(shapes):
    for name in ("mlx-lm-0.31", "mlx-lm-0.32"):
        assert BY_NAME[name].decide(Facts(shapes)).shift is make_plan(shapes, False, name).shift


@given(shapes=name_maps(), says=st.sampled_from(["γ", "γ−1", "unclear"]))
def test_no_rule_but_the_values_own_looks_at_the_values(shapes, says):
    facts = Facts(shapes)
    for rule in RULES[:-1]:
        assert rule.decide(facts) == rule.decide(replace(facts, says=says, mean=0.3))
