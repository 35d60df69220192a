import json

import numpy as np
import pytest
from safetensors import safe_open

from parity import suite
from parity.export import Recipe, convert, export
from parity.program import build
from parity.runners.transformers import TransformersRunner
from parity.taps import FULL, LINEAR
from qwen35.errors import InputError
from qwen35.headers import open_checkpoint

TEXT = suite.CHECKPOINTS["tiny"].text_config | {"num_hidden_layers": 4}
RECIPE = Recipe("tiny", TEXT)
STORED = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}


def tensors(folder):
    """Return name -> torch tensor of a checkpoint of one shard."""
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


@pytest.fixture(scope="module", params=STORED)
def pair(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("export")
    exported = export(RECIPE, folder / "transformers", request.param)
    return request.param, exported, convert(exported, folder / "mlx-lm")


def test_an_export_has_the_real_names(pair):
    _, exported, _ = pair
    names = open_checkpoint(exported).tensors
    for name in (
        "model.language_model.embed_tokens.weight",
        "model.language_model.layers.0.linear_attn.in_proj_qkv.weight",
        "model.language_model.layers.3.self_attn.q_norm.weight",
        "model.language_model.norm.weight",
        "model.visual.blocks.0.attn.qkv.weight",
        "lm_head.weight",
    ):
        assert name in names
    assert names["model.language_model.layers.0.linear_attn.conv1d.weight"].shape == (192, 1, 4)


def test_a_conversion_has_the_real_names(pair):
    *_, converted = pair
    names = open_checkpoint(converted).tensors
    assert all(name.startswith("language_model.") for name in names)
    assert "language_model.model.layers.3.self_attn.q_norm.weight" in names
    assert "language_model.lm_head.weight" in names
    assert names["language_model.model.layers.0.linear_attn.conv1d.weight"].shape == (192, 4, 1)


def test_only_a_log_is_not_of_the_dtype(pair):
    dtype, *folders = pair
    for folder in folders:
        for name, header in open_checkpoint(folder).tensors.items():
            assert header.dtype == ("F32" if name.endswith(".A_log") else STORED[dtype]), name


def test_gains_are_stored_as_each_generation_does(pair):
    _, exported, converted = pair
    name = "layers.0.input_layernorm.weight"
    before = tensors(exported)[f"model.language_model.{name}"]
    after = tensors(converted)[f"language_model.model.{name}"]
    assert abs(before.float().mean()) < 0.2
    assert (after == before + 1).all()
    gated = "layers.0.linear_attn.norm.weight"
    kept = tensors(exported)[f"model.language_model.{gated}"]
    assert abs(kept.float().mean() - 1) < 0.1
    assert (tensors(converted)[f"language_model.model.{gated}"] == kept).all()


def test_the_config_holds_both_forms_of_the_layer_pattern(pair):
    for folder in pair[1:]:
        text = json.loads((folder / "config.json").read_text())["text_config"]
        assert text["full_attention_interval"] == 4
        assert text["layer_types"] == [LINEAR] * 3 + [FULL]


def test_every_dtype_rounds_the_same_values(tmp_path, pair):
    dtype, exported, _ = pair
    wide = tensors(export(RECIPE, tmp_path / "wide", "float32"))
    for name, value in tensors(exported).items():
        assert (wide[name].to(value.dtype) == value).all(), (name, dtype)


def test_the_same_recipe_gives_the_same_bytes_and_another_seed_others(tmp_path):
    one, again, other = (
        export(Recipe("tiny", TEXT, seed), tmp_path / name, "bfloat16") / "model.safetensors"
        for name, seed in (("one", 0), ("again", 0), ("other", 1))
    )
    assert one.read_bytes() == again.read_bytes()
    assert one.read_bytes() != other.read_bytes()


def test_values_do_not_depend_on_the_other_layers(tmp_path):
    few = tensors(export(RECIPE, tmp_path / "few", "float32"))
    more = Recipe("more", TEXT | {"num_hidden_layers": 5})
    many = tensors(export(more, tmp_path / "many", "float32"))
    assert all((many[name] == value).all() for name, value in few.items())


def test_a_tied_model_has_no_head(tmp_path):
    tied = Recipe("tied", TEXT | {"tie_word_embeddings": True})
    exported = export(tied, tmp_path / "transformers", "bfloat16")
    assert "lm_head.weight" not in open_checkpoint(exported).tensors
    converted = open_checkpoint(convert(exported, tmp_path / "mlx-lm"))
    assert not any("lm_head" in name for name in converted.tensors)
    TransformersRunner(open_checkpoint(exported), "bfloat16").run(build([[1, 2, 3]]))


def test_decays_spread_and_layers_matter(tmp_path):
    checkpoint = open_checkpoint(export(RECIPE, tmp_path / "tiny", "float32"))
    ids = np.random.default_rng(0).integers(0, 131, (2, 60)).tolist()
    trace = TransformersRunner(checkpoint, "float32").run(build(ids))
    g = np.concatenate([trace.get(0, f"layers.{i}.linear_attn.g").ravel() for i in range(3)])
    assert 0.01 < g.min() < 0.2
    assert 0.99 < g.max() < 1
    for layer, mixer in ((0, "linear_attn"), (3, "self_attn")):
        increment = trace.get(0, f"layers.{layer}.{mixer}.out").std()
        assert 0.1 < increment / trace.get(0, f"layers.{layer}.residual").std() < 1


def test_a_small_qk_scale_brings_q_and_k_near_their_eps(tmp_path):
    small = Recipe("small", TEXT, qk_scale=4e-4)
    checkpoint = open_checkpoint(export(small, tmp_path / "small", "float32"))
    trace = TransformersRunner(checkpoint, "float32").run(build([list(range(40))]))
    keys = trace.get(0, "layers.0.linear_attn.conv_out")[..., 36:72].reshape(40, 3, 12)
    assert 2e-4 < np.median(np.linalg.norm(keys, axis=-1)) < 5e-3


def test_an_existing_folder_is_refused_and_left_alone(tmp_path, pair):
    (tmp_path / "mine").mkdir()
    for write in (
        lambda folder: export(RECIPE, folder, "float32"),
        lambda folder: convert(pair[1], folder),
    ):
        with pytest.raises(InputError, match="mine: already exists"):
            write(tmp_path / "mine")
    assert not list((tmp_path / "mine").iterdir())


def test_a_failure_leaves_nothing_behind(tmp_path, monkeypatch):
    def broken(*args):
        raise OSError("disk full")

    monkeypatch.setattr("parity.export._patch_config", broken)
    with pytest.raises(OSError, match="disk full"):
        export(RECIPE, tmp_path / "new", "float32")
    assert not list(tmp_path.iterdir())


def test_a_pattern_mlx_lm_cannot_express_is_refused(tmp_path):
    text = TEXT | {"layer_types": [FULL, LINEAR, LINEAR, FULL]}
    with pytest.raises(InputError, match="not every 4th layer full"):
        export(Recipe("odd", text), tmp_path / "odd", "float32")


def test_a_source_that_is_no_checkpoint_is_refused(tmp_path):
    with pytest.raises(InputError, match=r"no config\.json"):
        convert(tmp_path, tmp_path / "new")


def test_nothing_is_printed_and_no_network_is_used(tmp_path, monkeypatch, capfd):
    def refuse(*args):
        raise AssertionError("network")

    monkeypatch.setattr("socket.socket.connect", refuse)
    convert(export(RECIPE, tmp_path / "transformers", "bfloat16"), tmp_path / "mlx-lm")
    assert capfd.readouterr() == ("", "")
