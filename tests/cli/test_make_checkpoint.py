"""`parity make-checkpoint`: what it writes loads everywhere, and it needs next to no memory."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest

from parity import policy, safetensors_file, suite, taps
from parity.cli import main
from parity.program import build
from parity.run import Target, run
from parity.runners.registry import open_runner
from qwen35.headers import open_checkpoint
from qwen35.plan import make_plan

PROGRAM = build([[1, 2, 3, 4, 5], [9, 8, 7, 6, 5]], decode=1)
DRAFT_HEAD = {
    "mtp.fc.weight",
    "mtp.norm.weight",
    "mtp.pre_fc_norm_embedding.weight",
    "mtp.pre_fc_norm_hidden.weight",
    "mtp.layers.0.input_layernorm.weight",
    "mtp.layers.0.post_attention_layernorm.weight",
    *(f"mtp.layers.0.mlp.{name}_proj.weight" for name in ("gate", "up", "down")),
    *(f"mtp.layers.0.self_attn.{name}_proj.weight" for name in "qkvo"),
    *(f"mtp.layers.0.self_attn.{name}_norm.weight" for name in "qk"),
}


@pytest.fixture
def config(tmp_path):
    """The config.json of a small model, as a file; `changes` are to its text part."""

    def write(**changes):
        text = suite.CHECKPOINTS["tiny"].text_config | {"model_type": "qwen3_5_text"} | changes
        file = tmp_path / f"config-{len(list(tmp_path.iterdir()))}.json"
        file.write_text(json.dumps({"model_type": "qwen3_5", "text_config": text}))
        return str(file)

    return write


@pytest.fixture
def make(tmp_path, config):
    """Make a checkpoint of the small model and return its folder."""

    def made(*options, **changes):
        out = tmp_path / f"out-{len(list(tmp_path.iterdir()))}"
        words = ["make-checkpoint", str(out), "--config", config(**changes), *map(str, options)]
        assert main(words) == 0
        return out

    return made


def arrays(folder):
    found = {}
    for file in open_checkpoint(folder).files:
        found |= safetensors_file.read(file)
    return found


@pytest.mark.parametrize("generation", ["transformers", "mlx-lm"])
def test_it_runs_in_the_implementation_and_in_mlx_lm_bit_for_bit(make, generation):
    path = make("--generation", generation, "--dtype", "bfloat16")
    target = Target("x", open_checkpoint(path), generation, "bfloat16", {"p": PROGRAM}, "")
    (case,) = run([target], "impl", ["mlx-lm"], policy.load()).cases
    found = {item.verdict for item in case.pairs["mlx-lm"].comparisons}
    assert found == {"identical"}


def test_an_export_runs_in_transformers_as_the_same_model(make):
    checkpoint = open_checkpoint(make("--dtype", "float32", "--mtp", "--vision", "--shards", "2"))
    ours, theirs = (
        open_runner(name, checkpoint, "float32").run(PROGRAM) for name in ("impl", "transformers")
    )
    assert set(theirs.tensors) == {
        (f, name) for f in (0, 1) for name in taps.order(theirs.layer_types)
    }
    for forward in (0, 1):
        chosen = [t.tensors[forward, "logits"].argmax(-1) for t in (ours, theirs)]
        assert np.array_equal(*chosen)


def test_transformers_full_model_finds_every_tensor_of_the_vision_tower(make):
    from transformers import Qwen3_5ForConditionalGeneration

    path = make("--dtype", "float32", "--vision", "--mtp")
    _, found = Qwen3_5ForConditionalGeneration.from_pretrained(
        path, local_files_only=True, output_loading_info=True
    )
    assert not found["missing_keys"]
    assert not found["mismatched_keys"]
    assert {name.split(".")[0] for name in found["unexpected_keys"]} <= {"mtp"}


@pytest.mark.parametrize("generation", ["transformers", "mlx-lm"])
def test_mlx_lm_loads_it_as_a_user_does(make, generation):
    import mlx.core as mx
    import mlx_lm

    path = make("--generation", generation, "--dtype", "float32")
    model, _ = mlx_lm.load(str(path))
    (_, _, ids), _ = PROGRAM.forwards()
    logits = np.asarray(model(mx.array(ids)))
    ours = open_runner("impl", open_checkpoint(path), "float32").run(PROGRAM)
    assert logits.tobytes() == ours.tensors[0, "logits"].tobytes()


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_both_generations_of_one_seed_are_one_model(make, dtype):
    from mlx.utils import tree_flatten

    from parity.runners.mlx_arrays import to_numpy
    from qwen35.load import load

    export, converted = (
        make("--generation", generation, "--dtype", dtype, "--seed", "3")
        for generation in ("transformers", "mlx-lm")
    )
    assert make_plan({n: a.shape for n, a in arrays(converted).items()}, tied=False).identity
    weights = [dict(tree_flatten(load(path).parameters())) for path in (export, converted)]
    assert weights[0].keys() == weights[1].keys()
    for name, value in weights[0].items():
        assert to_numpy(value).tobytes() == to_numpy(weights[1][name]).tobytes(), name
    logits = [
        open_runner("impl", open_checkpoint(path), dtype).run(PROGRAM).tensors[1, "logits"]
        for path in (export, converted)
    ]
    assert logits[0].tobytes() == logits[1].tobytes()


def test_the_draft_head_has_the_public_names_and_follows_the_gains_convention(make):
    export, converted = (
        arrays(make("--mtp", "--generation", generation, "--dtype", "float32"))
        for generation in ("transformers", "mlx-lm")
    )
    for found in (export, converted):
        assert {name for name in found if "mtp" in name} == DRAFT_HEAD
    for name in DRAFT_HEAD:
        gain = np.float32(name.endswith("norm.weight") or "pre_fc_norm" in name)
        assert np.array_equal(converted[name], export[name] + gain)
    assert export["mtp.fc.weight"].shape == (44, 88)


def test_a_vision_tower_has_each_generations_prefix(make):
    export = make("--vision", "--mtp")
    converted = make("--vision", "--generation", "mlx-lm")
    towers = [
        {name.removeprefix(prefix) for name in arrays(path) if name.startswith(prefix)}
        for path, prefix in ((export, "model.visual."), (converted, "vision_tower."))
    ]
    assert towers[0] == towers[1]
    assert len(towers[0]) == 21


@pytest.mark.parametrize("bits", [4, 8])
def test_quantized_by_mlx_lm_itself_it_loads_there(make, bits):
    import mlx_lm

    sizes = {"hidden_size": 64, "intermediate_size": 96, "linear_value_head_dim": 32}
    path = make("--quantize", bits, "--group-size", 32, **sizes, num_attention_heads=15)
    stated = json.loads((path / "config.json").read_text())["quantization"]
    assert (stated["bits"], stated["group_size"]) == (bits, 32)
    assert any(name.endswith(".scales") for name in open_checkpoint(path).tensors)
    model, _ = mlx_lm.load(str(path))
    assert model.layers[0].mlp.up_proj.bits == bits
    assert [p.name for p in path.parent.iterdir() if p.name.startswith(".")] == []


def test_shards_change_files_and_no_value(make):
    whole, three = make(), make("--shards", "3")
    small = make("--shard-size", "100KB")
    assert [len(open_checkpoint(path).files) for path in (whole, three)] == [1, 3]
    sizes = [file.stat().st_size for file in open_checkpoint(three).files]
    assert max(sizes) < 1.5 * min(sizes)
    files = open_checkpoint(small).files
    assert len(files) > 4
    assert max(file.stat().st_size for file in files) < 110_000
    due = arrays(whole)
    for path in (three, small):
        found = arrays(path)
        assert list(found) == list(due)
        assert all(found[name].tobytes() == value.tobytes() for name, value in due.items())


def test_the_seed_alone_decides_the_values(make):
    same = [arrays(make("--seed", "1")) for _ in range(2)]
    other = arrays(make("--seed", "2"))
    assert all(same[0][name].tobytes() == same[1][name].tobytes() for name in other)
    assert not any(same[0][name].tobytes() == value.tobytes() for name, value in other.items())


def test_headers_only_has_the_headers_of_the_full_files_and_takes_no_room(make):
    full, sparse = make("--mtp", "--shards", "2"), make("--mtp", "--shards", "2", "--headers-only")
    for one, two in zip(open_checkpoint(full).files, open_checkpoint(sparse).files, strict=True):
        start = 8 + int.from_bytes(one.read_bytes()[:8], "little")
        assert one.read_bytes()[:start] == two.read_bytes()[:start]
        assert one.stat().st_size == two.stat().st_size
        assert two.stat().st_blocks * 512 < start + 64_000


def test_the_public_27b_size_is_made_anywhere(tmp_path, capsys):
    out = tmp_path / "27b"
    options = ["--size", "qwen3.8-27b", "--headers-only", "--shards", "11", "--mtp", "--vision"]
    assert main(["make-checkpoint", str(out), *options]) == 0
    assert "887 tensors, 54,641,493,992 bytes in 11 files (headers only)" in capsys.readouterr().out
    assert sum(file.stat().st_blocks for file in out.iterdir()) * 512 < 10_000_000


def test_layers_and_vocabulary_are_scaled_and_head_sizes_kept(tmp_path):
    out = tmp_path / "x"
    options = ["--size", "qwen3.5-0.8b", "--layers", "5", "--vocab", "99", "--headers-only"]
    assert main(["make-checkpoint", str(out), *options]) == 0
    text = json.loads((out / "config.json").read_text())["text_config"]
    assert (text["num_hidden_layers"], text["vocab_size"]) == (5, 99)
    assert text["layer_types"][3:] == ["full_attention", "linear_attention"]
    tensors = open_checkpoint(out).tensors
    assert tensors["model.language_model.embed_tokens.weight"].shape == (99, 1024)
    assert "model.language_model.layers.4.linear_attn.A_log" in tensors
    assert "lm_head.weight" not in tensors


def test_a_flat_config_is_nested(make, tmp_path):
    flat = suite.CHECKPOINTS["tiny"].text_config | {"model_type": "qwen3_5_text"}
    (tmp_path / "flat.json").write_text(json.dumps(flat))
    out = tmp_path / "flat"
    assert main(["make-checkpoint", str(out), "--config", str(tmp_path / "flat.json")]) == 0
    assert json.loads((out / "config.json").read_text())["model_type"] == "qwen3_5"
    assert set(arrays(out)) == set(arrays(make()))


# Linux hands ru_maxrss on from parent to child, through exec; VmHWM is the process's own.
MEASURED = """
import os, re, resource, sys
from parity.cli import main
code = main(sys.argv[1:])
loaded = {name.split(".")[0] for name in sys.modules}
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
if os.path.exists("/proc/self/status"):
    peak = re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]
print(code, peak, *loaded)
"""


def measured(*words):
    """Run the command line in a process; return its peak in MB and the packages it imported."""
    done = subprocess.run(
        [sys.executable, "-c", MEASURED, *words],
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        check=True,
    )
    code, peak, *loaded = done.stdout.splitlines()[-1].split()
    assert code == "0"
    return int(peak) / (1e6 if sys.platform == "darwin" else 1e3), set(loaded)


def test_memory_stays_small_beside_one_tensor_of_200_mb_and_no_framework_is_imported(
    tmp_path, config
):
    out, file = tmp_path / "large", config(vocab_size=1_200_000, tie_word_embeddings=True)
    peak, loaded = measured("make-checkpoint", str(out), "--config", file, "--dtype", "float32")
    (embedding,) = (n for n in open_checkpoint(out).tensors if "embed_tokens" in n)
    header = open_checkpoint(out).tensors[embedding]
    assert header.end - header.start > 200e6
    assert peak < 100, f"{peak:.0f} MB"
    assert not loaded & {"mlx", "mlx_lm", "torch", "transformers"}


def test_out_is_left_alone_where_it_exists(make, config, capsys):
    path = make()
    before = sorted((f.name, f.read_bytes()) for f in path.iterdir())
    assert main(["make-checkpoint", str(path), "--config", config()]) == 2
    assert f"parity: {path}: already exists. Choose another folder" in capsys.readouterr().err
    assert sorted((f.name, f.read_bytes()) for f in path.iterdir()) == before


def test_nothing_is_left_behind_by_a_failure(tmp_path, config, monkeypatch):
    from parity import synthetic

    def broken(*arguments):
        yield np.zeros(4, np.float32)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(synthetic, "values", broken)
    before = {*tmp_path.iterdir()}
    file = config()
    assert main(["make-checkpoint", str(tmp_path / "x"), "--config", file]) == 3
    assert {*tmp_path.iterdir()} - before == {type(tmp_path)(file)}


def test_a_disk_without_room_is_said_before_anything_is_written(tmp_path, capsys, monkeypatch):
    import shutil

    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(9, 8, 1000))
    assert main(["make-checkpoint", str(tmp_path / "x"), "--size", "qwen3.5-0.8b"]) == 3
    said = capsys.readouterr().err
    assert "bytes are to be written, the disk has 1,000 free. Give fewer --layers" in said
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--size", "qwen9"], "--size qwen9: known are qwen3.5-0.8b, qwen3.8-27b."),
        (["--config", "absent.json"], "absent.json: cannot be read"),
        (["--size", "qwen3.5-0.8b", "--layers", "0"], "--layers 0: give 1 or more."),
        (["--size", "qwen3.5-0.8b", "--seed", "-1"], "--seed -1: is negative."),
        (["--size", "qwen3.5-0.8b", "--shards", "999"], "--shards 999: the checkpoint has 320"),
        (["--size", "qwen3.5-0.8b", "--shard-size", "5 apples"], "5 apples: is no size. Give one"),
        (["--size", "qwen3.5-0.8b", "--group-size", "64"], "--group-size is that of --quantize."),
        (
            ["--size", "qwen3.5-0.8b", "--quantize", "4", "--mtp"],
            "--quantize with --mtp: mlx_lm.convert leaves the draft head out. Drop one.",
        ),
        (
            ["--size", "qwen3.5-0.8b", "--quantize", "4", "--generation", "transformers"],
            "--quantize writes mlx-lm's generation. Drop --generation transformers.",
        ),
    ],
)
def test_bad_options_are_refused_in_one_line(tmp_path, capsys, options, message):
    assert main(["make-checkpoint", str(tmp_path / "x"), *options]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("bits", [7, 99])
def test_bits_that_mlx_cannot_quantize_to_are_refused(tmp_path, config, capsys, bits):
    file = config(hidden_size=64, intermediate_size=96)
    words = ["make-checkpoint", str(tmp_path / "x"), "--config", file, "--quantize", str(bits)]
    assert main([*words, "--group-size", "32"]) == 2
    assert "mlx_lm.convert refuses it" in capsys.readouterr().err
    assert [p for p in tmp_path.iterdir() if p.name != os.path.basename(file)] == []
