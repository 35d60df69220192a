import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import JSON

from parity import suite
from parity.export import Recipe, convert, export
from qwen35.config import expected_shapes, parse_config
from qwen35.errors import CheckpointError
from qwen35.headers import open_checkpoint
from qwen35.plan import check, make_plan

TEXT = suite.CHECKPOINTS["tiny"].text_config


def nested(**changes):
    text = {k: v for k, v in (TEXT | changes).items() if v is not ...}
    return {"model_type": "qwen3_5", "text_config": text}


def test_nested_and_flat_give_the_same_sizes():
    flat = parse_config(TEXT | {"model_type": "qwen3_5_text"}, "m")
    assert expected_shapes(flat) == expected_shapes(parse_config(nested(), "m"))


def test_layers_follow_the_interval():
    kinds = parse_config(nested(num_hidden_layers=7), "m").layer_types
    assert [kind == "full_attention" for kind in kinds] == [False] * 3 + [True] + [False] * 3


def test_unknown_keys_are_kept_by_name():
    rope = TEXT["rope_parameters"] | {"factor": 4.0}
    config = nested(colour="red", rope_parameters=rope) | {"shape": 1}
    assert parse_config(config, "m").unknown == (
        "shape",
        "text_config.colour",
        "text_config.rope_parameters.factor",
    )


def test_all_missing_keys_are_named_at_once():
    with pytest.raises(
        CheckpointError, match=r"lacks text_config.hidden_size, text_config.head_dim"
    ):
        parse_config(nested(hidden_size=..., head_dim=...), "m")


def test_all_of_an_empty_config_is_missing_at_once():
    with pytest.raises(CheckpointError) as caught:
        parse_config({"model_type": "qwen3_5", "text_config": {}}, "m")
    for name in ("vocab_size", "rms_norm_eps", "rope_parameters.rope_theta"):
        assert f"text_config.{name}" in str(caught.value)


@pytest.mark.parametrize(
    "config",
    [
        nested() | {"model_type": "qwen3_5_moe"},
        nested(model_type="qwen3_5_moe_text"),
        nested(num_experts=8),
    ],
)
def test_a_mixture_of_experts_is_refused_as_not_implemented(config):
    with pytest.raises(CheckpointError, match=r"not implemented yet. Give a dense model"):
        parse_config(config, "m")


@pytest.mark.parametrize("name", ["qwen3_5_moe", "llama", None, ["qwen3_5"]])
def test_another_model_type_is_refused_by_name(name):
    with pytest.raises(CheckpointError, match="model_type") as caught:
        parse_config(nested() | {"model_type": name}, "m")
    assert str(name) in str(caught.value)
    assert "m/config.json" in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 0}, "text_config.hidden_size is 0"),
        ({"hidden_size": True}, "hidden_size is True"),
        ({"hidden_size": "44"}, "hidden_size is '44'"),
        ({"rms_norm_eps": 0}, "rms_norm_eps is 0"),
        ({"linear_num_value_heads": 7}, "no multiple of linear_num_key_heads"),
        ({"num_key_value_heads": 3}, "no multiple of num_key_value_heads"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"attn_output_gate": False}, "attn_output_gate is False"),
        ({"head_dim": 12}, "rotates 3 of 12"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000. At most"),
        ({"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim is 1. 2 or more"),
        ({"max_position_embeddings": "many"}, "max_position_embeddings is 'many'"),
        ({"attention_bias": None}, "attention_bias is None. true or false"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan"),
        ({"rope_scaling": {"rope_theta": 1e4}}, "rope_scaling says otherwise than rope_parameters"),
        ({"rope_theta": 1e4}, "rope_theta is 10000.0, text_config.rope_parameters.rope_theta 1000"),
        ({"partial_rotary_factor": 1}, "partial_rotary_factor is 1, text_config.rope_parameters"),
        ({"rope_parameters": {"full_attention": {}}}, "full_attention is a section of its own"),
        ({"rope_parameters": {"rope_theta": True}}, "rope_theta is True"),
        ({"quantization": "q4"}, "quantization is 'q4'"),
        ({"rope_parameters": {}}, "lacks text_config.rope_parameters.rope_theta"),
        ({"rope_parameters": [1]}, "rope_parameters is no JSON object"),
        ({"full_attention_interval": 0}, "full_attention_interval is 0"),
        ({"layer_types": ["linear_attention"]}, "no list of 7"),
        ({"layer_types": [["linear_attention"]] * 7}, "no list of 7"),
        ({"layer_types": ["sliding_attention"] * 7}, "no list of 7"),
        ({"layer_types": ["linear_attention"] * 7}, "says otherwise than full_attention_interval"),
        (
            {"layer_types": ["full_attention"] * 7, "full_attention_interval": ...},
            "mlx-lm only the second .4 if absent.. Write a full_attention_interval that agrees",
        ),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings is 1"),
    ],
)
def test_a_value_that_cannot_be_is_refused_with_the_remedy(changes, message):
    with pytest.raises(CheckpointError, match=message):
        parse_config(nested(**changes), "m")


def test_layer_types_that_agree_with_the_interval_are_taken():
    kinds = ["linear_attention", "full_attention"] * 3 + ["linear_attention"]
    config = parse_config(nested(layer_types=kinds, full_attention_interval=2), "m")
    assert list(config.layer_types) == kinds


def test_rope_is_read_where_older_configs_keep_it():
    old = nested(rope_parameters=..., rope_theta=5e5, partial_rotary_factor=0.5)
    config = parse_config(old, "m")
    assert (config.rope_theta, config.rotary_dim) == (5e5, TEXT["head_dim"] // 2)


ROPE = TEXT["rope_parameters"]


@pytest.mark.parametrize(
    "kind", ["yarn", "linear", "dynamic", "llama3", "longrope", "mrope", "proportional", None]
)
@pytest.mark.parametrize("key", ["rope_type", "type"])
@pytest.mark.parametrize("entry", ["rope_parameters", "rope_scaling"])
def test_a_rope_that_is_not_computed_is_refused_wherever_it_stands(entry, key, kind):
    other = {entry: ROPE | {key: kind}}
    for config in (
        nested(**other),
        nested() | other,
        TEXT | {"model_type": "qwen3_5_text"} | other,
    ):
        with pytest.raises(CheckpointError, match=f"{entry}.{key} is {kind!r}, which is not"):
            parse_config(config, "m")


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_scaling": None},
        {"rope_scaling": ROPE},
        {"rope_scaling": {"type" if k == "rope_type" else k: v for k, v in ROPE.items()}},
        {"rope_parameters": None, "rope_scaling": ROPE},
        {"rope_parameters": {"type": "default"} | ROPE},
        {"rope_theta": ROPE["rope_theta"], "partial_rotary_factor": 0.25},
        {"rope_parameters": {"rope_theta": ROPE["rope_theta"]}},
    ],
)
def test_a_rope_said_twice_in_one_sense_or_left_to_the_shared_default_is_read(changes):
    config = parse_config(nested(**changes), "m")
    assert (config.rope_theta, config.rotary_dim) == (ROPE["rope_theta"], TEXT["head_dim"] // 4)
    assert config.unknown == ()


@pytest.mark.parametrize("inner", [True, False, ...])
def test_heads_tied_at_the_top_level_alone_are_tied_unless_the_text_section_differs(inner):
    config = nested(tie_word_embeddings=inner) | {"tie_word_embeddings": inner is not False}
    assert parse_config(config, "m").tie_word_embeddings is (inner is not False)


@settings(deadline=None)
@given(name=st.sampled_from([*sorted(TEXT), "layer_types", "quantization"]), value=JSON)
def test_no_value_raises_anything_else(name, value):
    message = "m/config.json"
    try:
        parse_config(nested(**{name: value}), "m")
    except CheckpointError as error:
        message = str(error)
    assert message.startswith("m/config.json")


def test_a_biased_attention_has_four_more_parameters_a_full_layer():
    plain, biased = (
        expected_shapes(parse_config(nested(attention_bias=bias), "m")) for bias in (False, True)
    )
    extra = {name: shape for name, shape in biased.items() if name not in plain}
    heads, keys, width = (
        TEXT[n] for n in ("num_attention_heads", "num_key_value_heads", "head_dim")
    )
    assert extra == {
        "language_model.model.layers.3.self_attn.q_proj.bias": (2 * heads * width,),
        "language_model.model.layers.3.self_attn.k_proj.bias": (keys * width,),
        "language_model.model.layers.3.self_attn.v_proj.bias": (keys * width,),
        "language_model.model.layers.3.self_attn.o_proj.bias": (TEXT["hidden_size"],),
    }


@pytest.mark.parametrize("tied", [True, False])
def test_a_tied_model_has_no_head(tied):
    shapes = expected_shapes(parse_config(nested(tie_word_embeddings=tied), "m"))
    assert ("language_model.lm_head.weight" in shapes) is not tied


def test_heads_tied_in_one_section_and_not_in_the_other_are_refused():
    with pytest.raises(CheckpointError, match="differs between text_config and the top level"):
        parse_config(nested(tie_word_embeddings=False) | {"tie_word_embeddings": True}, "m")


def test_expected_shapes_are_those_of_real_checkpoints_of_both_generations(tmp_path):
    recipe = Recipe("tiny", TEXT, 0, suite.CHECKPOINTS["tiny"].qk_scale)
    exported = export(recipe, tmp_path / "exported", "float32")
    for path in (exported, convert(exported, tmp_path / "converted")):
        checkpoint = open_checkpoint(path)
        config = parse_config(checkpoint.config, path)
        plan = make_plan({name: t.shape for name, t in checkpoint.tensors.items()}, tied=False)
        assert {entry.target for entry in plan.entries} == set(expected_shapes(config))
        check(plan, checkpoint, config)
        assert not config.unknown
