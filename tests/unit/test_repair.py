"""A repaired checkpoint computes in mlx-lm itself what a right conversion does, bit for bit."""

import os
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from damaged_checkpoints import (
    in_shards,
    is_gain,
    rewrite,
    shifted,
    with_draft_head,
    with_export_names,
    with_moved_convs,
)
from mlx_lm.utils import load_model

from parity import safetensors_file
from parity.inspection import inspect
from parity.repair import repair
from parity.runners.mlx_arrays import to_numpy
from qwen35.errors import InputError
from qwen35.headers import open_checkpoint

IDS = mx.array([[1, 5, 7, 9, 2, 3, 100, 4]])


@pytest.fixture(params=["bfloat16", "float32", "float16"])
def dtype(request):
    return request.param


@pytest.fixture
def conversion(checkpoints):
    return checkpoints.path("tiny", "bfloat16", "mlx-lm")


def logits(folder):
    model, _ = load_model(Path(folder))
    return to_numpy(model(IDS))


def repaired(folder, out, rule="mlx-lm-0.32"):
    return repair(inspect(open_checkpoint(folder), rule), out)


def everything(folder):
    return {p.name: p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


CASES = {
    "a missed shift": shifted(-1),
    "a kept draft head": with_draft_head,
    "a missed shift and a kept draft head": lambda a: with_draft_head(shifted(-1)(a)),
    "conv weights of both layouts": lambda a: with_moved_convs(a, 2),
    "conv weights unconverted, gains converted": with_moved_convs,
    "converted values under export names": with_export_names,
}


@pytest.mark.parametrize("case", CASES)
def test_the_logits_are_those_of_a_right_conversion(conversion, tmp_path, case):
    broken = rewrite(conversion, tmp_path / "broken", CASES[case])
    if case != "a missed shift" and "missed" in case:
        assert not np.array_equal(logits(broken), logits(conversion))
    before = everything(broken)
    repaired(broken, tmp_path / "fixed")
    assert everything(broken) == before
    assert logits(tmp_path / "fixed").tobytes() == logits(conversion).tobytes()


def test_a_missed_shift_is_repaired_in_every_dtype(checkpoints, dtype, tmp_path):
    right = checkpoints.path("tiny", dtype, "mlx-lm")
    exported = safetensors_file.read(checkpoints.path("tiny", dtype) / "model.safetensors")

    def unshifted(arrays):  # the gains as the export stores them, before any rounding
        names = {n: n.replace("language_model.model", "model.language_model") for n in arrays}
        return {
            name: exported[names[name]] if name.endswith("norm.weight") else value
            for name, value in arrays.items()
        }

    broken = rewrite(right, tmp_path / "broken", unshifted)
    assert not np.array_equal(logits(broken), logits(right))
    done = repaired(broken, tmp_path / "fixed")
    assert (done.added, done.gains) == (1, 17)
    assert logits(tmp_path / "fixed").tobytes() == logits(right).tobytes()


def test_an_export_whose_gains_were_shifted_becomes_a_conversion(checkpoints, conversion, tmp_path):
    broken = rewrite(checkpoints.path("tiny", "bfloat16"), tmp_path / "broken", shifted(1))
    done = repaired(broken, tmp_path / "fixed")
    assert (done.added, done.moved, done.renamed) == (
        0,
        6,
        len(open_checkpoint(broken).tensors) - 21,
    )
    assert logits(tmp_path / "fixed").tobytes() == logits(conversion).tobytes()


def test_a_double_shift_is_undone_up_to_its_rounding(checkpoints, tmp_path):
    right = checkpoints.path("tiny", "float32", "mlx-lm")
    broken = rewrite(right, tmp_path / "broken", shifted(1))
    done = repaired(broken, tmp_path / "fixed")
    assert done.added == -1
    assert "that rounding stays" in str(done)
    found, due = logits(tmp_path / "fixed"), logits(right)
    assert np.abs(found - due).max() < 1e-4 * np.abs(due).max()
    assert np.abs(logits(broken) - due).max() > 0.1 * np.abs(due).max()


def test_shards_stay_and_the_index_is_written_again(conversion, tmp_path):
    whole = rewrite(conversion, tmp_path / "whole", with_draft_head)
    broken = in_shards(whole, tmp_path / "broken", 4)
    repaired(broken, tmp_path / "fixed")
    names = {path.name for path in (tmp_path / "fixed").glob("*.safetensors")}
    assert names == {path.name for path in broken.glob("*.safetensors")}
    assert logits(tmp_path / "fixed").tobytes() == logits(conversion).tobytes()


def test_only_gains_change(conversion, tmp_path):
    broken = rewrite(conversion, tmp_path / "broken", shifted(-1))
    repaired(broken, tmp_path / "fixed")
    found, fixed = (
        safetensors_file.read(folder / "model.safetensors")
        for folder in (broken, tmp_path / "fixed")
    )
    assert list(fixed) == list(found)
    for name, value in found.items():
        assert (fixed[name].shape, fixed[name].dtype) == (value.shape, value.dtype)
        same = fixed[name].tobytes() == value.tobytes()
        assert same != is_gain(name, value)


def test_vision_tensors_and_other_files_are_kept_and_folders_are_named(conversion, tmp_path):
    def with_tower(arrays):
        tower = {"vision_tower.blocks.0.norm.weight": np.zeros(4, np.float32)}
        return shifted(-1)(arrays) | tower

    broken = rewrite(conversion, tmp_path / "broken", with_tower)
    (broken / "notes.txt").write_text("x")
    (broken / "sub").mkdir()
    (broken / "other.safetensors").write_text("x")
    done = repaired(broken, tmp_path / "fixed")
    assert done.left == ("other.safetensors", "sub")
    assert "Not copied: other.safetensors, sub." in str(done)
    assert (tmp_path / "fixed" / "notes.txt").read_text() == "x"
    fixed = safetensors_file.read(tmp_path / "fixed" / "model.safetensors")
    assert not fixed["vision_tower.blocks.0.norm.weight"].any()


def test_links_are_followed_and_the_copy_shares_nothing(conversion, tmp_path):
    broken = rewrite(conversion, tmp_path / "broken", shifted(-1))
    linked = tmp_path / "linked"
    linked.mkdir()
    for path in broken.iterdir():
        (linked / path.name).symlink_to(path)
    repaired(linked, tmp_path / "fixed")
    for path in (tmp_path / "fixed").iterdir():
        assert not path.is_symlink()
        assert os.stat(path).st_nlink == 1


def refused(folder, out, match, rule="mlx-lm-0.32"):
    before = sorted(p.name for p in out.parent.iterdir())
    with pytest.raises(InputError, match=match):
        repaired(folder, out, rule)
    assert sorted(p.name for p in out.parent.iterdir()) == before


@pytest.mark.parametrize("generation", ["transformers", "mlx-lm"])
def test_nothing_wrong_is_refused(checkpoints, tmp_path, generation):
    right = checkpoints.path("tiny", "bfloat16", generation)
    refused(right, tmp_path / "out", "nothing to repair. Every rule that knows its names")


def test_values_that_are_unclear_or_mixed_are_refused(conversion, tmp_path):
    halves = rewrite(conversion, tmp_path / "a", lambda a: with_draft_head(halved(a)))
    refused(halves, tmp_path / "out", "values decide and they are unclear: .* Convert the original")

    def some(arrays):
        other = shifted(-1)(arrays)
        return arrays | {n: v for n, v in other.items() if ".layers.2." in n}

    refused(rewrite(conversion, tmp_path / "b", some), tmp_path / "out", "they are mixed: 2 of 14")


def halved(arrays):
    return {
        n: np.full_like(v, 0.48) if n.endswith("layernorm.weight") else v for n, v in arrays.items()
    }


def test_a_conv_weight_of_neither_layout_is_refused(conversion, tmp_path):
    def change(arrays):
        name = next(name for name in arrays if "conv1d" in name)
        return with_draft_head(arrays) | {name: np.repeat(arrays[name], 2, axis=2)}

    broken = rewrite(conversion, tmp_path / "broken", change)
    refused(broken, tmp_path / "out", r"conv1d.weight is \[\d+, 4, 2\], neither")


def test_a_place_that_is_taken_or_inside_the_checkpoint_is_refused(conversion, tmp_path):
    broken = rewrite(conversion, tmp_path / "broken", shifted(-1))
    (tmp_path / "out").mkdir()
    refused(broken, tmp_path / "out", "already exists")
    refused(broken, broken / "out", "lies in the checkpoint itself")


def test_a_copy_that_would_not_be_right_is_not_kept(conversion, tmp_path, monkeypatch):
    broken = rewrite(conversion, tmp_path / "broken", shifted(-1))
    monkeypatch.setattr("parity.repair._STEPS", {"γ−1": 2})
    refused(broken, tmp_path / "out", "not kept, as the copy would not be right either")
