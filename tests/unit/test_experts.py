"""The names of a mixture of experts, held to mlx-lm's and transformers' own loading."""

import json
import re

import numpy as np
import pytest
from mlx_lm.utils import load_model

from parity import safetensors_file, suite
from parity.inspection import inspect, to_json
from parity.synthetic import VISION
from qwen35.headers import open_checkpoint

EXPERTS, LAYERS = 3, 2


@pytest.fixture(scope="module")
def export(tmp_path_factory):
    """transformers' own export, in which experts stand one by one."""
    from transformers import Qwen3_5MoeConfig, Qwen3_5MoeForConditionalGeneration

    text = {k: v for k, v in suite.CHECKPOINTS["tiny"].text_config.items() if "interm" not in k}
    text |= {"num_hidden_layers": LAYERS, "full_attention_interval": 2, "num_experts": EXPERTS}
    text |= {"layer_types": ["linear_attention", "full_attention"], "num_experts_per_tok": 2}
    text |= {"moe_intermediate_size": 12, "shared_expert_intermediate_size": 10}
    vision = VISION | {"out_hidden_size": text["hidden_size"]}
    config = Qwen3_5MoeConfig(text_config=text, vision_config=vision, tie_word_embeddings=False)
    folder = tmp_path_factory.mktemp("moe") / "export"
    Qwen3_5MoeForConditionalGeneration(config).save_pretrained(folder)
    file = folder / "config.json"
    value = json.loads(file.read_text())
    value["text_config"]["full_attention_interval"] = 2
    file.write_text(json.dumps(value))
    return folder


def stacked(arrays):
    """As the public repositories hold them."""
    found = {name: value for name, value in arrays.items() if ".experts." not in name}
    for layer in range(LAYERS):
        own = f"model.language_model.layers.{layer}.mlp.experts."

        def all_of(*parts, own=own):
            single = range(EXPERTS)
            return np.stack(
                [np.concatenate([arrays[f"{own}{i}.{p}.weight"] for p in parts]) for i in single]
            )

        found[f"{own}gate_up_proj"] = all_of("gate_proj", "up_proj")
        found[f"{own}down_proj"] = all_of("down_proj")
    return found


def without_router(arrays):
    return {n: v for n, v in stacked(arrays).items() if "layers.1.mlp.gate." not in n}


def converted(arrays):
    """Names of mlx-lm's conversion."""
    found = {}
    for name, value in stacked(arrays).items():
        name = name.replace("model.language_model", "language_model.model")
        name = name if name.startswith("language_model.") else f"language_model.{name}"
        if name.endswith("gate_up_proj"):
            for part, half in zip(("gate", "up"), np.split(value, 2, axis=1), strict=True):
                found[name.replace("experts.gate_up_proj", f"switch_mlp.{part}_proj.weight")] = half
        else:
            found[name.replace("experts.down_proj", "switch_mlp.down_proj.weight")] = value
    return {name: value for name, value in found.items() if "visual" not in name}


@pytest.mark.parametrize("change", [dict, stacked, without_router, converted])
def test_names_are_missing_and_unexpected_as_mlx_lm_and_transformers_say(export, tmp_path, change):
    from transformers import AutoModelForCausalLM

    (tmp_path / "config.json").write_text((export / "config.json").read_text())
    arrays = change(safetensors_file.read(export / "model.safetensors"))
    safetensors_file.write(tmp_path / "model.safetensors", arrays)
    found = to_json(inspect(open_checkpoint(tmp_path)), "")
    assert found["missing"]["impl"] is None
    assert "mixture of experts" in found["refused"]["impl"]
    try:
        load_model(tmp_path, lazy=True)
        theirs = ""
    except ValueError as error:
        theirs = str(error)
    assert bool(theirs) == ("mlx-lm" in found["refused"])
    # mlx-lm names what is unexpected, and what is missing only where nothing is.
    due = found["unexpected"]["mlx-lm"] or found["missing"]["mlx-lm"]
    assert set(re.findall(r"language_model\.[\w.]+\w", theirs)) == set(due)
    if change is not converted:
        _, real = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
        for kind in ("missing", "unexpected"):
            ours = [name.replace("language_model.", "") for name in found[kind]["transformers"]]
            assert set(ours) == set(real[f"{kind}_keys"])
