import json
import shutil

import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache
from transformers.models.qwen3_5 import modeling_qwen3_5

from parity import suite
from parity.export import Recipe, export
from parity.program import build
from parity.runners import transformers_f64
from parity.runners.transformers import TransformersRunner
from parity.taps import all_taps, stream
from parity.trace import feed_from
from qwen35.errors import CannotRunError, CheckpointError
from qwen35.headers import open_checkpoint

TEXT = suite.CHECKPOINTS["tiny"].text_config | {"num_hidden_layers": 4}
LETTERS = {"B": 2, "H": 44, "I": 68, "V": 131, "Hq": 10, "Hkv": 5, "D": 32, "Hq*D": 320}
LETTERS |= {"Hk": 3, "Hv": 6, "Dk": 12, "Dv": 20, "C": 2 * 3 * 12 + 6 * 20, "n": 3}
DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
IDS = np.random.default_rng(7).integers(0, 131, (2, 13)).tolist()
CHUNKED = build(IDS, decode=2, chunk=4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("transformers")


@pytest.fixture(scope="module")
def path(folder):
    return export(Recipe("tiny", TEXT), folder / "float32", "float32")


@pytest.fixture(scope="module")
def runner(path):
    return TransformersRunner(open_checkpoint(path), "float32")


@pytest.fixture(scope="module")
def exact(path):
    return TransformersRunner(open_checkpoint(path), "float32", "float64")


def relative(a, b):
    return np.linalg.norm(a - b) / np.linalg.norm(b)


def joined(trace, tap):
    return np.concatenate([v for (_, name), v in trace.tensors.items() if name == tap], axis=1)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_tap_has_the_documented_shape(path, dtype):
    runner = TransformersRunner(open_checkpoint(path), dtype)
    trace = runner.run(CHUNKED)
    due, seen = {}, 0
    for forward, (_, _, ids) in enumerate(CHUNKED.forwards()):
        seen += ids.shape[1]
        sizes = LETTERS | {"S": ids.shape[1], "T": seen}
        for name, tap in all_taps(runner.layer_types):
            due[forward, name] = tuple(sizes[letter] for letter in tap.shape.split())
    assert {key: value.shape for key, value in trace.tensors.items()} == due


@pytest.mark.parametrize("dtype", DTYPES)
def test_taps_keep_the_dtype_they_are_computed_in(path, dtype):
    trace = TransformersRunner(open_checkpoint(path), dtype).run(CHUNKED)
    for tap in ("embed_tokens", "layers.0.linear_attn.y", "layers.3.self_attn.keys", "logits"):
        assert trace.get(0, tap).dtype == DTYPES[dtype]
    for tap in ("q", "k", "g", "recurrent_state"):
        assert trace.get(0, f"layers.0.linear_attn.{tap}").dtype == np.float32


@pytest.mark.parametrize("dtype", DTYPES)
def test_observing_changes_no_bit_of_the_logits(path, dtype):
    runner = TransformersRunner(open_checkpoint(path), dtype)
    trace = runner.run(CHUNKED)
    cache = DynamicCache(config=runner.config)
    for forward, (_, _, ids) in enumerate(CHUNKED.forwards()):
        with torch.no_grad():
            logits = runner.model(torch.from_numpy(ids.copy()), cache=cache, use_cache=True).logits
        recorded = trace.get(forward, "logits").view(np.uint8)
        np.testing.assert_array_equal(
            recorded, logits.view(torch.uint8).numpy(), err_msg=f"forward {forward}"
        )


def test_an_exception_leaves_no_hook_behind(runner):
    functions = dict(vars(modeling_qwen3_5))

    def broken(forward, layer):
        if layer == 2:
            raise KeyError("no such stream")
        return np.zeros((2, 4, 44), np.float32)

    with pytest.raises(KeyError):
        runner.run(CHUNKED, broken)
    assert vars(modeling_qwen3_5) == functions
    for module in runner.model.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks


@pytest.mark.parametrize("dtype", DTYPES)
def test_its_own_trace_fed_back_is_reproduced(path, dtype):
    runner = TransformersRunner(open_checkpoint(path), dtype)
    free = runner.run(CHUNKED)
    fed = runner.run(CHUNKED, feed_from(free))
    assert fed.tensors.keys() == free.tensors.keys()
    for key, value in free.tensors.items():
        np.testing.assert_array_equal(
            value.view(np.uint8), fed.tensors[key].view(np.uint8), str(key)
        )


def test_a_feed_reaches_its_layer_and_only_that_layer(runner):
    program = build(IDS)
    free = runner.run(program)

    def feed(forward, layer):
        own = free.get(forward, stream(layer))
        return own * 2.0 if layer == 2 else own

    fed = runner.run(program, feed)
    changed = {
        name for (_, name), value in free.tensors.items() if (value != fed.get(0, name)).any()
    }
    # A norm undoes a factor of two up to its eps, so its own layer's residual is the sure sign.
    assert "layers.2.residual" in changed
    assert all(name.startswith("layers.2.") for name in changed)


def test_a_chunked_prefill_ends_in_the_states_of_a_whole_one(exact):
    whole, chunked = exact.run(build(IDS)), exact.run(build(IDS, chunk=5))
    states = [name for name, tap in all_taps(exact.layer_types) if tap.state]
    assert states
    for name in states:
        np.testing.assert_allclose(chunked.get(2, name), whole.get(0, name), rtol=0, atol=1e-13)


def test_states_recorded_early_are_not_overwritten_later(runner):
    alone, longer = runner.run(build([r[:5] for r in IDS])), runner.run(build(IDS, chunk=5))
    for name, tap in all_taps(runner.layer_types):
        if tap.state:
            np.testing.assert_array_equal(alone.get(0, name), longer.get(0, name))


def test_a_conv_tail_longer_than_the_prompt_begins_with_zeros(runner):
    trace = runner.run(build([row[:2] for row in IDS]))
    tail, qkv = (trace.get(0, f"layers.0.linear_attn.{name}") for name in ("conv_tail", "qkv"))
    assert not tail[:, :1].any()
    np.testing.assert_array_equal(tail[:, 1:], qkv)


def test_the_linear_taps_satisfy_the_recurrence(exact):
    # Written out here, so that no transposed state and no wrong head order can pass.
    trace = exact.run(build(IDS))
    q, k, v, beta, g, y, state = (
        trace.get(0, f"layers.1.linear_attn.{name}")
        for name in ("q", "k", "v", "beta", "g", "y", "recurrent_state")
    )
    q, k = (x.repeat(2, axis=2) for x in (q, k))
    s = np.zeros_like(state)
    for t in range(q.shape[1]):
        s = s * g[:, t, :, None, None]
        delta = (v[:, t] - np.einsum("bhvk,bhk->bhv", s, k[:, t])) * beta[:, t, :, None]
        s = s + np.einsum("bhv,bhk->bhvk", delta, k[:, t])
        np.testing.assert_allclose(np.einsum("bhvk,bhk->bhv", s, q[:, t]), y[:, t], atol=1e-13)
    np.testing.assert_allclose(s, state, atol=1e-13)


def test_a_log_keeps_its_stored_values_in_bfloat16(path):
    runner = TransformersRunner(open_checkpoint(path), "bfloat16")
    stored = TransformersRunner(open_checkpoint(path), "float32")
    for one, other in zip(runner.model.model.layers[:3], stored.model.model.layers, strict=False):
        assert one.linear_attn.A_log.dtype == torch.float32
        assert torch.equal(one.linear_attn.A_log, other.linear_attn.A_log)
        assert one.linear_attn.dt_bias.dtype == torch.bfloat16


@pytest.mark.parametrize("model_type", ["qwen3_5_text", "qwen3_5"])
@pytest.mark.parametrize("prefix", ["model.", "model.language_model."])
def test_a_text_only_export_gives_the_same_trace(path, runner, tmp_path, prefix, model_type):
    # transformers saves a text model made from a nested checkpoint under the nested names.
    weights = load_file(path / "model.safetensors")
    renamed = {
        name.replace("model.language_model.", prefix): value
        for name, value in weights.items()
        if ".visual." not in name
    }
    save_file(renamed, tmp_path / "model.safetensors", {"format": "pt"})
    text = json.loads((path / "config.json").read_text())["text_config"]
    (tmp_path / "config.json").write_text(json.dumps(text | {"model_type": model_type}))
    text_only = TransformersRunner(open_checkpoint(tmp_path), "float32").run(CHUNKED)
    nested = runner.run(CHUNKED)
    assert text_only.tensors.keys() == nested.tensors.keys()
    for key, value in nested.tensors.items():
        np.testing.assert_array_equal(text_only.tensors[key], value)


def test_a_missing_tensor_is_an_error(path, tmp_path):
    shutil.copytree(path, tmp_path / "holed")
    file = tmp_path / "holed" / "model.safetensors"
    weights = load_file(file)
    del weights["model.language_model.layers.1.mlp.up_proj.weight"]
    save_file(weights, file, {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"missing keys: model\.layers\.1\.mlp\.up_proj"):
        TransformersRunner(open_checkpoint(tmp_path / "holed"), "float32")


def test_nothing_is_printed_and_no_network_is_used(path, monkeypatch, capfd):
    def refuse(*args):
        raise AssertionError("network")

    monkeypatch.setattr("socket.socket.connect", refuse)
    TransformersRunner(open_checkpoint(path), "float32").run(CHUNKED)
    assert capfd.readouterr() == ("", "")


def test_float64_computes_nothing_in_float32(exact):
    narrow = set()

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            for value in out if isinstance(out, tuple | list) else (out,):
                if isinstance(value, torch.Tensor) and value.is_floating_point():
                    narrow.update({str(func)} if value.dtype != torch.float64 else ())
            return out

    with Watch():
        trace = exact.run(CHUNKED)
    assert not narrow
    assert {v.dtype for (_, n), v in trace.tensors.items() if "offset" not in n} == {
        np.dtype(np.float64)
    }
    buffers = exact.model.model.rotary_emb
    due = 1e7 ** (-np.arange(0, 8, 2) / 8)
    np.testing.assert_allclose(buffers.inv_freq.numpy(), due, rtol=1e-15)


def test_float64_prefill_and_decode_agree_to_rounding(exact):
    # Two algorithms, chunks and single tokens: what one does in float32 the other would show.
    whole, single = exact.run(build(IDS)), exact.run(build(IDS, decode=12))
    for tap in ("layers.0.output", "layers.3.output", "logits"):
        assert relative(joined(whole, tap), joined(single, tap)) < 1e-13


def test_float64_is_near_float32_and_leaves_transformers_alone(runner, exact):
    assert exact.name == "transformers-f64"
    narrow, wide = runner.run(CHUNKED), exact.run(CHUNKED)
    assert 1e-9 < relative(joined(narrow, "logits"), joined(wide, "logits")) < 1e-5
    assert narrow.get(0, "logits").dtype == np.float32


def test_float64_is_the_truth_of_the_cast_weights(path):
    narrow = TransformersRunner(open_checkpoint(path), "bfloat16")
    wide = TransformersRunner(open_checkpoint(path), "bfloat16", "float64")
    for (name, one), (_, other) in zip(
        narrow.model.named_parameters(), wide.model.named_parameters(), strict=True
    ):
        assert torch.equal(one.double(), other), name


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("self.weight.float()", "self.weight", "Qwen3_5RMSNorm has 1 casts to float32, not 2"),
        ("self._norm(x.float())", "self._norm(x.half().float())", "Qwen3_5RMSNorm uses .half"),
        ("def eager_attention_forward", "def attend", "eager_attention_forward has 0 casts"),
    ],
)
def test_a_changed_transformers_stops_the_rewrite(old, new, said):
    with open(modeling_qwen3_5.__file__, encoding="utf-8") as file:
        source = file.read()
    assert old in source
    with pytest.raises(CannotRunError, match=said):
        transformers_f64.rewrite(source.replace(old, new), "modeling_qwen3_5.py")
