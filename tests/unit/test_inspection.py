"""The cases of public reports, on real checkpoints: what is said, and what would happen where."""

import json

import numpy as np
import pytest
from damaged_checkpoints import (
    in_shards,
    rewrite,
    shifted,
    with_draft_head,
    with_export_names,
    with_moved_convs,
)

from parity.inspection import inspect, to_json
from parity.rules import NAMES
from qwen35.errors import CheckpointError, InputError
from qwen35.headers import open_checkpoint


@pytest.fixture
def export(checkpoints):
    return checkpoints.path("tiny", "bfloat16")


@pytest.fixture
def conversion(checkpoints):
    return checkpoints.path("tiny", "bfloat16", "mlx-lm")


def value(folder, **options):
    return to_json(inspect(open_checkpoint(folder), **options), "parity inspect x")


def changed_config(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_a_real_export_is_read_the_same_by_all(export):
    found = value(export)
    assert found["verdict"] == "holds"
    assert found["generation"] == "transformers"
    assert found["conv_layout"]["layout"] == "transformers"
    assert found["evidence"]["says"] == "γ−1"
    assert {rule["shift"] for rule in found["rules"].values()} == {True}
    assert all(rule["idempotent"]["loaded_again"] for rule in found["rules"].values())


def test_a_real_conversion_is_read_the_same_by_all_that_can(conversion):
    found = value(conversion)
    assert (found["verdict"], found["exit"]) == ("holds", 0)
    assert (found["generation"], found["evidence"]["says"]) == ("mlx-lm", "γ")
    assert {name: rule["shift"] for name, rule in found["rules"].items()} == {
        name: None if name == "transformers" else False for name in NAMES
    }
    assert found["missing"]["mlx-lm"] == found["unexpected"]["mlx-lm"] == []
    assert found["missing"]["impl"] == found["unexpected"]["impl"] == []
    assert len(found["missing"]["transformers"]) > 20


@pytest.mark.parametrize("generation", ["transformers", "mlx-lm"])
def test_the_json_is_plain_complete_and_carries_its_sources(checkpoints, generation):
    found = value(checkpoints.path("tiny", "bfloat16", generation))
    assert json.loads(json.dumps(found)) == found
    assert set(found) >= {
        *("schema", "verdict", "exit", "sentence", "generation", "rules", "evidence", "agree"),
        *("conv_layout", "quantization", "missing", "unexpected", "disagreements", "draft_head"),
        *("vision", "parameters", "bytes", "repeat"),
    }
    assert all(rule["source"] for rule in found["rules"].values())
    assert all(set(row) == set(NAMES) for row in found["disagreements"].values())


def test_a_conversion_that_kept_its_draft_head(conversion, tmp_path):
    found = value(rewrite(conversion, tmp_path / "m", with_draft_head))
    assert (found["verdict"], found["exit"], found["agree"]) == ("differs", 1, False)
    assert not found["contradicted"]
    assert found["sentence"] == (
        "The gains are stored as γ: mlx-lm-0.31, mlx-vlm-0.6.5 and mlx-swift-lm-403 would compute "
        f"with γ+1 (layer norms near {found['evidence']['mean_gain'] + 1:.2f} instead of 1), and "
        "the model babbles there; mlx-lm-0.32, mlx-vlm, mlx-swift-lm and value-mean would load it "
        "right."
    )
    assert found["draft_head"]["names"] == ["mtp.norm.weight"]
    assert found["disagreements"]["mlx-lm-0.31"]["mlx-lm-0.32"] is True
    assert found["disagreements"]["mlx-lm-0.31"]["transformers"] is None


def test_the_older_rule_chosen_is_contradicted_by_the_values(conversion, tmp_path):
    folder = rewrite(conversion, tmp_path / "m", with_draft_head)
    assert value(folder, rule="mlx-lm-0.31")["contradicted"]


def test_a_missed_shift(conversion, tmp_path):
    found = value(rewrite(conversion, tmp_path / "m", shifted(-1)))
    assert found["contradicted"]
    assert found["exit"] == 1
    assert found["sentence"].startswith("The gains are stored as γ−1: mlx-lm-0.31, mlx-lm-0.32, ")
    assert found["sentence"].endswith("; no published loader loads it right.")


def test_a_shift_made_twice(conversion, tmp_path):
    found = value(rewrite(conversion, tmp_path / "m", shifted(1)))
    assert found["evidence"]["says"] == "γ+1"
    assert found["exit"] == 1
    assert found["sentence"].endswith("no loader loads it right.")


def test_an_export_with_gains_already_shifted(export, tmp_path):
    found = value(rewrite(export, tmp_path / "m", shifted(1)))
    assert found["rules"]["transformers"]["gains_become"] == "γ+1"
    assert found["exit"] == 1


def test_converted_values_under_export_names(conversion, tmp_path):
    found = value(rewrite(conversion, tmp_path / "m", with_export_names))
    assert not found["agree"]
    assert found["rules"]["mlx-vlm"]["gains_become"] == "γ+1"
    assert found["rules"]["transformers"]["loads"] is False


def test_conv_weights_of_both_layouts(conversion, tmp_path):
    found = value(rewrite(conversion, tmp_path / "m", lambda a: with_moved_convs(a, 1)))
    assert found["conv_layout"]["layout"] == "mixed"
    assert found["generation"] == "mixed"
    assert found["contradicted"]


def test_gains_of_both_conventions(conversion, tmp_path):
    def some(arrays):
        other = shifted(-1)(arrays)
        return arrays | {n: v for n, v in other.items() if ".layers.1." in n or ".layers.2." in n}

    found = value(rewrite(conversion, tmp_path / "m", some))
    assert found["evidence"]["says"] == "mixed"
    assert found["exit"] == 1
    assert "Every loader reads a part of the gains wrongly" in found["sentence"]


def test_a_rule_that_cannot_load_it_does_not_hold(conversion):
    found = value(conversion, rule="transformers")
    assert found["exit"] == 1
    assert found["sentence"].startswith("transformers cannot load it: it does not know the name")


def test_without_evidence_disagreement_is_still_told(conversion, tmp_path):
    folder = rewrite(conversion, tmp_path / "m", with_draft_head)
    found = value(folder, evidence=False)
    assert found["evidence"]["says"] == "not read"
    assert found["evidence"]["values_read"] == 0
    assert found["sentence"].startswith("Loaders disagree, and the model babbles in some: ")
    assert found["exit"] == 1


def test_shards_change_nothing_but_the_count(conversion, tmp_path):
    found, whole = value(in_shards(conversion, tmp_path / "m", 3)), value(conversion)
    assert (found["files"], whole["files"]) == (3, 1)
    for key in ("sentence", "parameters", "bytes", "missing", "unexpected", "conv_layout"):
        assert found[key] == whole[key]


def test_vision_tensors_are_counted_and_change_no_rule(conversion, tmp_path):
    def with_tower(arrays):
        return arrays | {"vision_tower.blocks.0.norm1.weight": np.ones(4, np.float32)}

    found = value(rewrite(conversion, tmp_path / "m", with_tower))
    assert found["vision"] == {
        "tensors": 1, "bytes": 16, "names": ["vision_tower.blocks.0.norm1.weight"]
    }  # fmt: skip
    assert found["verdict"] == "holds"
    assert found["unexpected"]["mlx-lm"] == []


def test_a_tied_head_that_mlx_lm_refuses_is_unexpected_there_alone(conversion, tmp_path):
    folder = tmp_path / "m"
    rewrite(conversion, folder, lambda arrays: arrays)
    config = json.loads((folder / "config.json").read_text())
    changed_config(
        folder,
        text_config=config["text_config"] | {"tie_word_embeddings": True},
        tie_word_embeddings=True,
    )
    found = value(folder)
    assert found["unexpected"]["mlx-lm"] == ["language_model.lm_head.weight"]
    assert found["unexpected"]["impl"] == []


def test_missing_unexpected_and_misshapen_tensors_are_named(conversion, tmp_path):
    def change(arrays):
        arrays = dict(arrays)
        del arrays["language_model.model.norm.weight"]
        name = "language_model.model.embed_tokens.weight"
        return arrays | {"language_model.x": np.ones(1, np.float32), name: arrays[name][:-1]}

    found = value(rewrite(conversion, tmp_path / "m", change))
    for reader in ("impl", "mlx-lm"):
        assert found["missing"][reader] == ["language_model.model.norm.weight"]
        assert found["unexpected"][reader] == ["language_model.x"]
    assert [wrong["name"] for wrong in found["wrong_shapes"]] == [
        "language_model.model.embed_tokens.weight"
    ]


def test_a_quantized_conversion_is_counted_as_what_it_decodes_to(checkpoints, tmp_path):
    from parity.export import convert

    plain = value(checkpoints.path("heads-0.8b", "bfloat16", "mlx-lm"))
    folder = convert(checkpoints.path("heads-0.8b", "bfloat16"), tmp_path / "q", 4, 32)
    found = value(folder)
    assert found["quantization"]["global"]["bits"] == 4
    assert found["quantization"]["quantized_modules"] > 0
    assert found["quantization"]["problem"] is None
    assert found["parameters"] == plain["parameters"]
    assert found["bytes"]["total"] < plain["bytes"]["total"]
    assert found["unexpected"]["mlx-lm"] == []
    assert found["verdict"] == "holds"


def test_quantization_entries_of_single_modules_and_trellis_are_shown(conversion, tmp_path):
    folder = rewrite(conversion, tmp_path / "m", lambda arrays: arrays)
    own = {"mode": "trellis", "bits": 3}
    entry = {"group_size": 64, "bits": 4, "language_model.model.layers.0.mlp.up_proj": own}
    changed_config(folder, quantization=entry)
    found = value(folder)["quantization"]
    assert found["global"] == {"group_size": 64, "bits": 4}
    assert found["modules"] == {"language_model.model.layers.0.mlp.up_proj": own}
    assert found["trellis"]


def test_a_mixture_of_experts_is_judged_and_not_run(conversion, tmp_path):
    folder = rewrite(conversion, tmp_path / "m", with_draft_head)
    changed_config(folder, model_type="qwen3_5_moe")
    found = value(folder)
    assert found["exit"] == 1
    assert found["missing"]["impl"] is None
    assert found["missing"]["mlx-lm"][0].endswith("layers.0.mlp.gate.weight")
    assert "mixture of experts" in found["refused"]["impl"]


def test_another_family_is_refused(conversion, tmp_path):
    folder = rewrite(conversion, tmp_path / "m", lambda arrays: arrays)
    changed_config(folder, model_type="llama")
    with pytest.raises(CheckpointError, match=r"model_type is 'llama'\. Known are qwen3_5, "):
        value(folder)


def test_two_names_for_one_tensor_are_refused(conversion, tmp_path):
    folder = rewrite(
        conversion,
        tmp_path / "m",
        lambda a: a | {"model.norm.weight": a["language_model.model.norm.weight"]},
    )
    with pytest.raises(CheckpointError, match=r"are both 'language_model\.model\.norm\.weight'"):
        value(folder)


def test_an_unknown_rule_is_refused(conversion):
    with pytest.raises(InputError, match=r"--rule x: no such rule\. Known are mlx-lm-0.31, "):
        value(conversion, rule="x")
