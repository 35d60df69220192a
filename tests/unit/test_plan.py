"""The loading plan, held to the installed mlx-lm's own sanitize."""

import json
from types import SimpleNamespace

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models import qwen3_5, qwen3_5_moe
from sanitized import mlx_lm_sanitize, same_as_mlx_lm
from strategies import name_maps

from parity import suite
from parity.runners.mlx_arrays import to_numpy
from qwen35.config import expected_shapes, parse_config
from qwen35.errors import CheckpointError
from qwen35.headers import Checkpoint, TensorHeader
from qwen35.plan import SHIFTED, check, make_plan

TRANSFORMERS = {
    "model.language_model.embed_tokens.weight": (9, 4),
    "model.language_model.norm.weight": (4,),
    "model.language_model.layers.0.input_layernorm.weight": (4,),
    "model.language_model.layers.0.linear_attn.norm.weight": (3,),
    "model.language_model.layers.0.linear_attn.conv1d.weight": (6, 1, 4),
    "lm_head.weight": (9, 4),
    "model.visual.patch_embed.proj.weight": (2, 2),
    "mtp.norm.weight": (4,),
}
CONVERTED = {
    "language_model.model.layers.0.linear_attn.conv1d.weight": (6, 4, 1),
    "language_model.model.norm.weight": (4,),
    "language_model.lm_head.weight": (9, 4),
}


HEAD = "language_model.lm_head.weight"
HUNDREDS = max(400, settings.default.max_examples)
"""Maps drawn where the plan is held to mlx-lm itself: one suffix that is lost must be seen."""


def test_a_converted_checkpoint_gets_no_plan():
    assert make_plan(CONVERTED, tied=False).identity


def test_a_transformers_export_is_folded_moved_and_shifted():
    plan = make_plan(TRANSFORMERS, tied=False)
    said = {e.target: (e.move_conv, e.add_one) for e in plan.entries}
    assert plan.generation == "transformers"
    assert said == {
        "language_model.model.embed_tokens.weight": (False, False),
        "language_model.model.norm.weight": (False, True),
        "language_model.model.layers.0.input_layernorm.weight": (False, True),
        "language_model.model.layers.0.linear_attn.norm.weight": (False, False),
        "language_model.model.layers.0.linear_attn.conv1d.weight": (True, False),
        "language_model.lm_head.weight": (False, False),
    }
    assert dict(plan.dropped) == {
        "model.visual.patch_embed.proj.weight": "vision",
        "mtp.norm.weight": "draft head",
    }


def test_the_rules_disagree_on_a_converted_checkpoint_that_kept_its_draft_head():
    kept = CONVERTED | {"mtp.norm.weight": (4,)}
    assert make_plan(kept, False, "mlx-lm-0.31").shift
    assert not make_plan(kept, False, "mlx-lm-0.32").shift


def test_a_head_kept_in_a_tied_model_is_dropped_and_reported():
    plan = make_plan(CONVERTED, tied=True)
    assert plan.dropped == ((HEAD, "the head is tied to the embedding"),)
    assert not plan.identity


@pytest.mark.parametrize(
    "shapes",
    [
        CONVERTED | {"model.language_model.layers.1.mlp.up_proj.weight": (3, 2)},
        CONVERTED | {"language_model.model.layers.1.linear_attn.conv1d.weight": (6, 1, 4)},
    ],
)
def test_names_or_conv_weights_of_both_generations_are_called_mixed(shapes):
    assert make_plan(shapes, False).generation == "mixed"


def test_a_text_only_export_is_transformers():
    shapes = {n.replace("language_model.", ""): s for n, s in TRANSFORMERS.items()}
    plan = make_plan(shapes, False)
    assert plan.generation == "transformers"
    assert {e.target for e in plan.entries} == {
        e.target for e in make_plan(TRANSFORMERS, False).entries
    }


def test_an_unknown_rule_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match=r"'mlx-lm-9'; known are mlx-lm-0.31, mlx-lm-0.32"):
        make_plan(CONVERTED, False, "mlx-lm-9")


def test_the_plan_is_plain_json():
    plan = make_plan(TRANSFORMERS, False).to_json()
    assert json.loads(json.dumps(plan)) == plan


def test_the_grounds_name_the_tensor():
    assert "layers.0.linear_attn.conv1d.weight" in make_plan(TRANSFORMERS, False).because


def test_two_names_for_one_tensor_are_refused_by_both_names():
    with pytest.raises(ValueError, match=r"'model.norm.weight' and 'language_model\.model\.norm"):
        make_plan({"model.norm.weight": (4,), "language_model.model.norm.weight": (4,)}, False)


def test_the_plan_prints_its_decision():
    assert "gains are γ−1" in str(make_plan(TRANSFORMERS, False))


@settings(deadline=None, max_examples=HUNDREDS)
@given(shapes=name_maps(), dtype=st.sampled_from(["float32", "float16", "bfloat16"]))
def test_names_decisions_and_values_are_those_of_mlx_lms_sanitize(shapes, dtype):
    same_as_mlx_lm(make_plan, shapes, dtype)


@settings(deadline=None, max_examples=HUNDREDS)
@given(shapes=name_maps())
def test_a_tied_plan_differs_from_mlx_lms_in_nothing_but_the_head(shapes):
    theirs = mlx_lm_sanitize({n: mx.zeros(s) for n, s in shapes.items()}, tied=True)
    ours = {entry.target for entry in make_plan(shapes, tied=True).entries}
    # mlx-lm 0.32.2 renames lm_head.weight before it looks for it, so it never drops it.
    assert ours == set(theirs) - {HEAD}


@settings(deadline=None, max_examples=HUNDREDS)
@given(shapes=name_maps(), tied=st.booleans())
def test_the_rules_differ_in_the_shift_alone_and_only_where_a_draft_head_was_kept(shapes, tied):
    old, new = (make_plan(shapes, tied, rule) for rule in ("mlx-lm-0.31", "mlx-lm-0.32"))
    kept = any("mtp." in name for name, why in old.dropped if why == "draft head")
    assert old.shift == (new.shift or kept)
    assert [(e.source, e.target, e.move_conv) for e in old.entries] == [
        (e.source, e.target, e.move_conv) for e in new.entries
    ]
    assert old.dropped == new.dropped


@settings(deadline=None)
@given(shapes=name_maps(), tied=st.booleans())
def test_every_tensor_is_loaded_once_or_dropped_with_a_reason(shapes, tied):
    plan = make_plan(shapes, tied)
    assert sorted([e.source for e in plan.entries] + [n for n, _ in plan.dropped]) == sorted(shapes)
    assert all(why for _, why in plan.dropped)


@settings(deadline=None)
@given(shapes=name_maps(), rule=st.sampled_from(["mlx-lm-0.31", "mlx-lm-0.32"]), data=st.data())
def test_the_order_of_shards_and_names_decides_nothing(shapes, rule, data):
    order = data.draw(st.permutations(list(shapes)))
    one, two = make_plan(shapes, False, rule), make_plan({n: shapes[n] for n in order}, False, rule)
    assert (one.shift, one.generation) == (two.shift, two.generation)
    assert set(one.entries) == set(two.entries)
    assert set(one.dropped) == set(two.dropped)


def moe_sanitize(weights):
    model = SimpleNamespace()
    inner = SimpleNamespace(args=SimpleNamespace(tie_word_embeddings=False, num_hidden_layers=1))
    inner.sanitize = lambda w: qwen3_5.TextModel.sanitize(inner, w)
    model.language_model = inner
    return qwen3_5_moe.Model.sanitize(model, weights)


@settings(deadline=None)
@given(
    shapes=name_maps(),
    dtype=st.sampled_from(["float32", "float16", "bfloat16"]),
    prefix=st.sampled_from(["model.language_model.", "language_model.model."]),
)
def test_a_mixture_of_experts_differs_in_nothing_but_its_experts(shapes, dtype, prefix):
    experts = f"{prefix}layers.0.mlp.experts."
    shapes = {n: s for n, s in shapes.items() if ".experts." not in n}
    shapes |= {f"{experts}gate_up_proj": (2, 6, 4), f"{experts}down_proj": (2, 4, 3)}
    shapes |= {f"{prefix}layers.0.mlp.gate.weight": (2, 4)}
    weights = {
        name: mx.array(np.random.default_rng(len(name)).normal(0, 0.3, shape), getattr(mx, dtype))
        for name, shape in shapes.items()
    }
    theirs = moe_sanitize(dict(weights))
    plan = make_plan(shapes, tied=False)
    split = {e.target for e in plan.entries if ".experts." in e.target}
    switch = {name for name in theirs if ".switch_mlp." in name}
    assert (len(split), len(switch)) == (2, 3)
    assert {e.target for e in plan.entries} - split == set(theirs) - switch
    for entry in plan.entries:
        if entry.target not in split:
            value = weights[entry.source]
            value = value.moveaxis(2, 1) if entry.move_conv else value
            value = value + 1.0 if entry.add_one else value
            assert to_numpy(value).tobytes() == to_numpy(theirs[entry.target]).tobytes()


CONFIG = parse_config(
    {"model_type": "qwen3_5", "text_config": suite.CHECKPOINTS["tiny"].text_config}, "m"
)
DUE = expected_shapes(CONFIG)
EMBEDDING = "language_model.model.embed_tokens.weight"
CONV = "language_model.model.layers.0.linear_attn.conv1d.weight"


def checked(tmp_path, shapes, dtypes=None):
    headers = {
        name: TensorHeader(
            name, (dtypes or {}).get(name, "BF16"), shape, tmp_path / "model.safetensors", 0, 0
        )
        for name, shape in shapes.items()
    }
    plan = make_plan(shapes, tied=False)
    check(plan, Checkpoint(tmp_path, {}, headers), CONFIG)
    return plan


def exported(shapes):
    names = {
        name: name.replace("language_model.model", "model.language_model")
        if name.startswith("language_model.model")
        else name.removeprefix("language_model.")
        for name in shapes
    }
    return {
        names[name]: (shape[0], shape[2], shape[1]) if "conv1d" in name else shape
        for name, shape in shapes.items()
    }


def test_a_complete_conversion_is_accepted_as_it_is(tmp_path):
    assert checked(tmp_path, DUE).identity


def test_a_complete_export_is_accepted_and_every_gain_but_the_gated_norms_is_shifted(tmp_path):
    plan = checked(tmp_path, exported(DUE))
    assert plan.generation == "transformers"
    shifted = {e.target for e in plan.entries if e.add_one}
    assert shifted == {name for name in DUE if name.endswith(SHIFTED)}
    assert not any("linear_attn.norm" in name for name in shifted)


def test_names_missing_and_unexpected_are_listed_together_with_a_count(tmp_path):
    shapes = {n: s for n, s in DUE.items() if "layers.2.mlp" not in n and "layers.1.mlp" not in n}
    with pytest.raises(CheckpointError) as caught:
        checked(tmp_path, shapes | {"language_model.x": (1,)})
    said = str(caught.value)
    assert said.startswith(f"{tmp_path}: lacks 6 tensors of its config.json: ")
    assert "layers.1.mlp.down_proj.weight" in said
    assert "and 3 more; has 1 that its config.json does not: language_model.x" in said
    assert said.endswith("Give the config.json and weights of one model.")


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        (EMBEDDING, (7, 5), r"'\S+embed_tokens.weight' has shape \[7, 5\], config.json asks for"),
        (CONV, (5, 1, 9), r"has shape \[5, 1, 9\] \(\[5, 9, 1\] once its axis is moved\)"),
        (CONV, (5, 9), r"has shape \[5, 9\]"),
    ],
)
def test_a_wrong_shape_names_the_file_the_tensor_and_both_shapes(tmp_path, name, shape, message):
    with pytest.raises(CheckpointError, match=message) as caught:
        checked(tmp_path, DUE | {name: shape})
    assert str(caught.value).startswith(f"{tmp_path}/model.safetensors: tensor {name!r}")
    assert str(list(DUE[name])) in str(caught.value)


def test_a_dtype_that_is_no_float_is_refused_by_name(tmp_path):
    with pytest.raises(CheckpointError, match=r"is I32, one of F32, F16, BF16 is due\. Give"):
        checked(tmp_path, DUE, {EMBEDDING: "I32"})


@pytest.mark.parametrize("ending", ["scales", "biases"])
def test_a_quantized_checkpoint_is_refused_as_not_run_yet(tmp_path, ending):
    name = f"language_model.model.embed_tokens.{ending}"
    with pytest.raises(CheckpointError, match=f"{name}.*not run yet. Give the checkpoint it was"):
        checked(tmp_path, DUE | {name: (2, 2)})
