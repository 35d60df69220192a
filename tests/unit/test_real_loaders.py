"""What inspect says of names, held to what mlx-lm and transformers themselves say on loading."""

import json
import re

import ml_dtypes
import numpy as np
import pytest
from damaged_checkpoints import rewrite
from mlx_lm.utils import load_model

from parity.inspection import inspect, to_json
from parity.repair import repair
from qwen35.headers import open_checkpoint

HEAD = "lm_head.weight"


def without_layer_5(arrays):
    return {name: value for name, value in arrays.items() if "layers.5." not in name}


def with_another_layer(arrays):
    return arrays | {"model.language_model.layers.99.x": np.ones(3, np.float32)}


def with_draft_head(arrays):
    return arrays | {"mtp.norm.weight": np.ones(44, ml_dtypes.bfloat16)}


def bare(arrays):
    """A text model's own names."""
    return {n.replace("model.language_model.", "model."): v for n, v in arrays.items()}


def text_only(arrays):
    return {name: value for name, value in bare(arrays).items() if "visual" not in name}


def flat(config):
    text = config["text_config"] | {"model_type": "qwen3_5_text"}
    return text | {"architectures": ["Qwen3_5ForCausalLM"]}


def tied_outside(config):
    text = {k: v for k, v in config["text_config"].items() if k != "tie_word_embeddings"}
    return config | {"text_config": text, "tie_word_embeddings": True}


def tied_inside(config):
    text = config["text_config"] | {"tie_word_embeddings": True}
    outer = {k: v for k, v in config.items() if k != "tie_word_embeddings"}
    return outer | {"text_config": text}


def without_head(arrays):
    return {name: value for name, value in arrays.items() if name != HEAD}


def same(value):
    return value


CASES = {
    "as exported": (same, same),
    "a layer missing": (without_layer_5, same),
    "a name too many": (with_another_layer, same),
    "a draft head": (with_draft_head, same),
    "a text model's names": (text_only, same),
    "a text model's names and config": (text_only, flat),
    "tied by the outer config alone": (without_head, tied_outside),
    "tied by the text config alone": (without_head, tied_inside),
    "tied with its head stored": (same, tied_inside),
}


@pytest.fixture(params=CASES)
def folder(request, checkpoints, tmp_path):
    arrays, config = CASES[request.param]
    folder = rewrite(checkpoints.path("tiny", "bfloat16"), tmp_path / "m", arrays)
    file = folder / "config.json"
    file.write_text(json.dumps(config(json.loads(file.read_text()))))
    return folder


def said(folder):
    return to_json(inspect(open_checkpoint(folder)), "")


def refusal(folder):
    """Return mlx-lm's own words, None where it loads."""
    try:
        load_model(folder)
    except ValueError as error:
        return str(error)
    return None


def hold_to_mlx_lm(folder):
    found, theirs = said(folder), refusal(folder)
    assert ("mlx-lm" in found["refused"]) == (theirs is not None)
    assert ("; mlx-lm refuses to load it: " in found["sentence"]) == (theirs is not None)
    if theirs is None or "not supported" in theirs:
        return
    listed = set(re.findall(r"language_model\.[\w.]+\w", theirs))
    assert listed == {*found["missing"]["mlx-lm"], *found["unexpected"]["mlx-lm"]}
    assert theirs.startswith("Missing") == bool(found["missing"]["mlx-lm"])


def test_mlx_lm_loads_or_refuses_as_said(folder):
    hold_to_mlx_lm(folder)


def test_transformers_misses_and_ignores_as_said(folder):
    import torch
    from transformers import AutoModelForCausalLM

    _, theirs = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, output_loading_info=True
    )
    found = said(folder)
    for kind in ("missing", "unexpected"):
        ours = [name.replace("language_model.", "") for name in found[kind]["transformers"]]
        assert set(ours) == set(theirs[f"{kind}_keys"])
    assert ("; transformers makes up " in found["sentence"]) == bool(theirs["missing_keys"])


PROJECTION = "language_model.model.layers.0.mlp.down_proj"


def entry(config, **own):
    quantization = config["quantization"] | own
    return config | {"quantization": quantization, "quantization_config": quantization}


QUANTIZED = {
    "as converted": (same, same),
    "no entry": (
        same,
        lambda c: {k: v for k, v in c.items() if not k.startswith("quantization")},
    ),
    "a module said to be whole": (same, lambda c: entry(c, **{PROJECTION: False})),
    "biases lost": (
        lambda a: {n: v for n, v in a.items() if n != f"{PROJECTION}.biases"},
        same,
    ),
    "scales of a norm": (
        lambda a: a | {"language_model.model.norm.scales": np.ones(2, np.float32)},
        same,
    ),
}


@pytest.fixture(scope="module")
def quantized(checkpoints, tmp_path_factory):
    from parity.export import convert

    export = checkpoints.path("heads-0.8b", "bfloat16")
    return convert(export, tmp_path_factory.mktemp("quantized") / "q", 4, 64)


@pytest.mark.parametrize("case", QUANTIZED)
def test_mlx_lm_loads_or_refuses_a_quantized_model_as_said(quantized, tmp_path, case):
    arrays, config = QUANTIZED[case]
    folder = rewrite(quantized, tmp_path / "m", arrays)
    file = folder / "config.json"
    file.write_text(json.dumps(config(json.loads(file.read_text()))))
    found, theirs = said(folder), refusal(folder)
    assert ("mlx-lm" in found["refused"]) == (theirs is not None)
    wrong = {*found["missing"]["mlx-lm"], *found["unexpected"]["mlx-lm"]}
    if theirs is not None:
        assert int(re.search(r"\d+", theirs)[0]) == len(wrong)
        assert all(name in theirs for name in sorted(wrong)[:2])
    assert found["refused"]["impl"] == "it does not run quantized checkpoints yet"


def test_a_repair_drops_a_tied_models_head_so_that_mlx_lm_loads_it(checkpoints, tmp_path):
    folder = rewrite(checkpoints.path("tiny", "bfloat16"), tmp_path / "m", same)
    file = folder / "config.json"
    file.write_text(json.dumps(tied_inside(json.loads(file.read_text()))))
    assert "lm_head" in refusal(folder)
    done = repair(inspect(open_checkpoint(folder)), tmp_path / "out")
    assert done.dropped == ((HEAD, "the head is tied to the embedding"),)
    assert refusal(tmp_path / "out") is None
