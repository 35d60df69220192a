import ast
import json
import math
import warnings
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from parity import reference, suite
from parity.program import ProgramError, build
from parity.reference import Part, ReferenceRunner, read_config, read_weights
from parity.taps import FULL, LINEAR, all_taps, split
from parity.trace import Trace, feed_from
from qwen35.config import parse_config

SIZES = {"B": 2, "H": 14, "I": 9, "V": 23, "Hq": 6, "Hkv": 3, "D": 8, "Hq*D": 48}
SIZES |= {"Hk": 2, "Hv": 4, "Dk": 5, "Dv": 7, "C": 2 * 2 * 5 + 4 * 7, "n": 2}
TEXT = {
    "hidden_size": 14,
    "num_hidden_layers": 4,
    "full_attention_interval": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 5,
    "linear_value_head_dim": 7,
    "vocab_size": 23,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
}
IDS = np.random.default_rng(5).integers(0, 23, (2, 11)).tolist()
GAINS = ("input_layernorm.weight", "post_attention_layernorm.weight", "q_norm.weight")
GAINS += ("k_norm.weight", "language_model.norm.weight")


def drawn():
    """Return a transformers checkpoint of TEXT; gains are multiples of 2⁻⁷, so 1 + w is exact."""
    draw = np.random.default_rng(11)
    normal = lambda *shape: (draw.normal(size=shape) / np.sqrt(shape[-1])).astype(np.float32)
    gain = lambda n: (draw.integers(-40, 40, n) / 128).astype(np.float32)
    H, intermediate, C = SIZES["H"], SIZES["I"], SIZES["C"]
    model = "model.language_model."
    out = {
        model + "embed_tokens.weight": normal(23, H),
        model + "norm.weight": gain(H),
        "lm_head.weight": normal(23, H),
    }
    for i in range(4):
        linear = f"{model}layers.{i}.linear_attn."
        full = f"{model}layers.{i}.self_attn."
        out |= {
            f"{model}layers.{i}.input_layernorm.weight": gain(H),
            f"{model}layers.{i}.post_attention_layernorm.weight": gain(H),
            f"{model}layers.{i}.mlp.gate_proj.weight": normal(intermediate, H),
            f"{model}layers.{i}.mlp.up_proj.weight": normal(intermediate, H),
            f"{model}layers.{i}.mlp.down_proj.weight": normal(H, intermediate),
        }
        if i % 2:
            out |= {
                full + "q_proj.weight": normal(2 * 48, H),
                full + "k_proj.weight": normal(24, H),
                full + "v_proj.weight": normal(24, H),
                full + "o_proj.weight": normal(H, 48),
                full + "q_norm.weight": gain(8),
                full + "k_norm.weight": gain(8),
            }
        else:
            out |= {
                linear + "in_proj_qkv.weight": normal(C, H),
                linear + "in_proj_z.weight": normal(28, H),
                linear + "in_proj_b.weight": normal(4, H),
                linear + "in_proj_a.weight": normal(4, H),
                linear + "conv1d.weight": normal(C, 1, 3),
                linear + "A_log": normal(4),
                linear + "dt_bias": normal(4),
                linear + "norm.weight": 1 + gain(7),
                linear + "out_proj.weight": normal(H, 28),
            }
    return out


def as_mlx_lm(tensors):
    """Return the same checkpoint as mlx-lm converts it."""
    out = {}
    for name, value in tensors.items():
        if name.endswith("conv1d.weight"):
            value = np.ascontiguousarray(value.swapaxes(1, 2))
        if name.endswith(GAINS):
            value = value + np.float32(1)
        folded = name.replace("model.language_model.", "language_model.model.")
        out[folded if folded != name else "language_model." + name] = value
    return out


def written(folder, tensors, config=None):
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config or {"text_config": TEXT}))
    return folder


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return written(tmp_path_factory.mktemp("reference") / "transformers", drawn())


@pytest.fixture(scope="module")
def runner(path):
    return ReferenceRunner(path, "float32")


def close(a, b):
    return np.linalg.norm(a - b) <= 1e-12 * np.linalg.norm(b)


def part(weights):
    return Part("", weights, {}, Trace("by hand", ()), 0)


# The operations, worked by hand.


def test_the_recurrence_decays_then_recalls_then_writes_then_reads():
    # One head, Dk 2, Dv 1. Token 0 recalls 0 and writes 3·½ along (1, 0). Token 1 finds that
    # halved, recalls ¾ along (1, 1), and writes (2¾ − ¾)·½ = 1 along it.
    tokens = lambda *rows: np.array(rows, float).reshape(1, 2, 1, -1)
    half = np.full((1, 2, 1), 0.5)
    q, k, v = tokens([2, 1], [2, -1]), tokens([1, 0], [1, 1]), tokens([3], [2.75])
    y, state = reference.gated_delta_rule(q, k, v, half, half, np.zeros((1, 1, 1, 2)))
    assert y.tolist() == [[[[3.0]], [[2.5]]]]
    assert state.tolist() == [[[[1.75, 1.0]]]]


def test_a_head_keeps_its_own_state():
    draw = np.random.default_rng(1).normal
    q, k, v = draw(size=(2, 3, 4, 5)), draw(size=(2, 3, 4, 5)), draw(size=(2, 3, 4, 7))
    g, beta, state = draw(size=(2, 3, 4)), draw(size=(2, 3, 4)), draw(size=(2, 4, 7, 5))
    y, after = reference.gated_delta_rule(q, k, v, g, beta, state)
    one = slice(2, 3)
    alone = reference.gated_delta_rule(
        q[:, :, one], k[:, :, one], v[:, :, one], g[:, :, one], beta[:, :, one], state[:, one]
    )
    assert close(alone[0], y[:, :, one])
    assert close(alone[1], after[:, one])


def test_the_last_tap_of_the_convolution_meets_the_newest_token():
    window = np.array([[[1, 10], [2, 20], [3, 30], [4, 40]]], float)
    weight = np.array([[1, 2, 3], [0, 0, 1]], float)
    assert reference.causal_conv(window, weight).tolist() == [[[14, 30], [20, 40]]]


def test_rope_turns_halves_of_the_first_dimensions():
    # θ = 4 and 4 rotary dimensions: frequencies 1 and ½. At position π, (x₀, x₂) makes half a
    # turn, (x₁, x₃) a quarter; x₄ and x₅ stay.
    x = np.arange(1.0, 7.0).reshape(1, 1, 1, 6)
    out = reference.rope(x, np.array([math.pi]), 4.0, 4)
    np.testing.assert_allclose(out.ravel(), [-1, -4, -3, 2, 5, 6], atol=1e-15)


def test_the_norms_put_eps_where_the_model_does():
    x = np.array([3e-3, 4e-3])
    np.testing.assert_allclose(reference.l2_norm(x), x / math.sqrt(25e-6 + 1e-6), rtol=1e-15)
    seven = reference.rms_norm(np.array([1.0, 7.0]), np.array([1.0, 2.0]), 11.0)
    np.testing.assert_allclose(seven, [1 / 6, 14 / 6], rtol=1e-15)


def test_heads_repeat_as_neighbours():
    assert reference.repeat_heads(np.array([[7, 8]]), 2, axis=1).tolist() == [[7, 7, 8, 8]]


def test_activations_stay_exact_and_silent_at_extremes():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert reference.sigmoid(np.array([-1000.0, 0.0, 1000.0])).tolist() == [0, 0.5, 1]
        assert reference.silu(np.array([-1000.0, 1000.0])).tolist() == [0, 1000]
        assert reference.softmax(np.array([1000.0, 1000.0, -np.inf])).tolist() == [0.5, 0.5, 0]


def test_a_linear_layer_of_one_head_and_two_tokens():
    # Every size is 1 and K is 2. Tokens 1 and 2 project to q = x, k = 2x, v = 3x, z = x, a = b = 0.
    one = np.ones((1, 1))
    weights = {
        "linear_attn.in_proj_qkv.weight": np.array([[1.0], [2.0], [3.0]]),
        "linear_attn.in_proj_z.weight": one,
        "linear_attn.in_proj_b.weight": 0 * one,
        "linear_attn.in_proj_a.weight": 0 * one,
        "linear_attn.conv1d.weight": np.array([[0.5, 1.0]] * 3),
        "linear_attn.A_log": np.array([math.log(2)]),
        "linear_attn.dt_bias": np.array([math.log(math.e - 1)]),  # softplus gives 1
        "linear_attn.norm.weight": np.array([2.0]),
        "linear_attn.out_proj.weight": 5 * one,
    }
    names = ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim")
    config = {f"linear_{name}": 1 for name in names} | {"rms_norm_eps": 0.25}
    layer = part(weights)
    out = reference.linear_attention(layer, config, np.array([[[1.0], [2.0]]]))

    silu = lambda x: x / (1 + math.exp(-x))
    unit = lambda x: x / math.sqrt(x * x + 1e-6)
    g = math.exp(-2.0)
    state, due = 0.0, []
    for x, mixed in ((1.0, 1.0), (2.0, 0.5 * 1.0 + 2.0)):
        q, k, v = unit(silu(mixed)), unit(silu(2 * mixed)), silu(3 * mixed)
        state *= g
        state += (v - state * k) * 0.5 * k
        y = state * q
        due.append(5 * (2 * y / math.sqrt(y * y + 0.25)) * silu(x))
    np.testing.assert_allclose(out.ravel(), due, rtol=1e-14)
    assert layer.cache["conv_tail"].tolist() == [[[2.0, 4.0, 6.0]]]
    np.testing.assert_allclose(layer.cache["recurrent_state"].ravel(), [state], rtol=1e-14)


def test_an_attention_layer_of_one_head_and_two_tokens():
    # D is 2, so the one pair turns by the position. Queries and keys are (√2, 0) once normalized;
    # turned by 0 and 1 they score 2·cos(1)/√2 against each other and 2/√2 against themselves.
    weights = {
        "self_attn.q_proj.weight": np.array([[1.0], [0.0], [1.0], [-1.0]]),
        "self_attn.k_proj.weight": np.array([[3.0], [0.0]]),
        "self_attn.v_proj.weight": np.array([[1.0], [10.0]]),
        "self_attn.q_norm.weight": np.ones(2),
        "self_attn.k_norm.weight": np.ones(2),
        "self_attn.o_proj.weight": np.array([[1.0, 100.0]]),
    }
    config = {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 2}
    config |= {"rms_norm_eps": 0.0, "rope_theta": 1e7, "rotary_dim": 2}
    out = reference.full_attention(part(weights), config, np.array([[[1.0], [3.0]]]))

    old, new = math.exp(math.sqrt(2) * math.cos(1)), math.exp(math.sqrt(2))
    mean = (1 * old + 3 * new) / (old + new)
    sigmoid = lambda x: 1 / (1 + math.exp(-x))
    due = [
        value * sigmoid(gate) + 100 * 10 * value * sigmoid(-gate)
        for value, gate in ((1, 1), (mean, 3))
    ]
    np.testing.assert_allclose(out.ravel(), due, rtol=1e-14)


# The whole model.


@pytest.mark.parametrize("chunk", [None, 1, 4])
def test_every_tap_is_float64_in_the_documented_shape(runner, chunk):
    program = build(IDS, decode=2, chunk=chunk)
    trace = runner.run(program)
    due, seen = {}, 0
    for forward, (_, _, ids) in enumerate(program.forwards()):
        seen += ids.shape[1]
        sizes = SIZES | {"S": ids.shape[1], "T": seen}
        for name, tap in all_taps(runner.layer_types):
            shape = tuple(sizes[letter] for letter in tap.shape.split())
            due[forward, name] = (shape, "int32" if tap.kind == "exact" else "float64")
    found = {key: (value.shape, value.dtype.name) for key, value in trace.tensors.items()}
    assert found == due
    assert trace.info == {"numpy": np.__version__, "dtype": "float64", "weights": "float32"}


def test_offset_and_conv_tail_follow_the_tokens(runner):
    trace = runner.run(build(IDS, decode=2, chunk=4))
    offsets = [trace.get(forward, "layers.1.self_attn.offset").tolist() for forward in range(5)]
    assert offsets == [[4, 4], [8, 8], [9, 9], [10, 10], [11, 11]]
    rows = [trace.get(forward, "layers.0.linear_attn.qkv") for forward in range(5)]
    tail = trace.get(4, "layers.0.linear_attn.conv_tail")
    np.testing.assert_array_equal(tail, np.concatenate(rows, axis=1)[:, -2:])


@pytest.mark.parametrize("chunk", [1, 2, 3, 8, None])
def test_chunks_and_decode_equal_one_shot(runner, chunk):
    whole = runner.run(build(IDS))
    program = build(IDS, decode=3, chunk=chunk)
    parts = runner.run(program)
    forwards = range(len(program.forwards()))
    for name, tap in all_taps(runner.layer_types):
        values = [parts.get(forward, name) for forward in forwards]
        letters = tap.shape.split()
        joined = values[-1] if tap.state else np.concatenate(values, letters.index("S"))
        assert close(joined, whole.get(0, name)), name


@pytest.mark.parametrize("row", [0, 1])
def test_a_row_of_a_batch_equals_that_row_alone(runner, row):
    both = runner.run(build(IDS, decode=2, chunk=4))
    alone = runner.run(build(IDS[row : row + 1], decode=2, chunk=4))
    for key, value in alone.tensors.items():
        assert close(both.tensors[key][row : row + 1], value), key


def test_a_fed_trace_reproduces_itself(runner):
    program = build(IDS, decode=2, chunk=4)
    free = runner.run(program)
    fed = runner.run(program, feed_from(free))
    assert list(fed.tensors) == list(free.tensors)
    for key, value in free.tensors.items():
        np.testing.assert_array_equal(fed.tensors[key], value)


@pytest.mark.parametrize("at", [0, 2, 4])
def test_a_feed_replaces_what_enters_a_layer_and_nothing_recorded_before_it(runner, at):
    program = build(IDS)
    free = runner.run(program)

    def feed(forward, layer):
        stream = feed_from(free)(forward, layer)
        return (2 * stream).astype(np.float32) if layer == at else stream

    fed = runner.run(program, feed)
    changed = {
        name for (_, name), value in fed.tensors.items() if (value != free.get(0, name)).any()
    }
    layers = {4 if split(name)[0] is None else split(name)[0] for name in changed}
    assert layers == {at}


def test_an_id_outside_the_vocabulary_is_refused(runner):
    with pytest.raises(ProgramError, match="outside the vocabulary of 23"):
        runner.run(build([[1, -1]]))


# The checkpoint.


def test_both_generations_and_a_text_only_export_are_one_model(runner, tmp_path):
    tensors = drawn()
    text_only = {k.replace(".language_model.", "."): v for k, v in tensors.items()}
    flat = TEXT | {"layer_types": [LINEAR, FULL, LINEAR, FULL], "full_attention_interval": None}
    due = runner.run(build(IDS, decode=1))
    for folder in (
        written(tmp_path / "mlx-lm", as_mlx_lm(tensors)),
        written(tmp_path / "text", text_only, flat),
    ):
        trace = ReferenceRunner(folder, "float32").run(build(IDS, decode=1))
        assert trace.tensors.keys() == due.tensors.keys()
        for key, value in due.tensors.items():
            np.testing.assert_array_equal(trace.tensors[key], value)


def test_vision_and_draft_tensors_are_dropped(path, tmp_path):
    extra = {"model.visual.x": np.ones(3), "vision_tower.x": np.ones(3)}
    extra |= {"mtp.norm.weight": np.ones(3), "language_model.mtp.layers.0.x": np.ones(3)}
    folder = written(tmp_path / "more", drawn() | extra)
    assert read_weights(folder, "float32").keys() == read_weights(path, "float32").keys()


def test_a_kept_draft_head_shifts_no_gain(tmp_path):
    converted = as_mlx_lm(drawn())
    folder = written(tmp_path / "kept", converted | {"mtp.norm.weight": np.ones(3, np.float32)})
    due = converted["language_model.model.norm.weight"]
    np.testing.assert_array_equal(read_weights(folder, "float32")["norm.weight"], due)


@pytest.mark.parametrize("stored", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_weights_are_rounded_once_ties_to_even_and_a_log_is_not(tmp_path, stored):
    tensors = {name: value.astype(stored) for name, value in drawn().items()}
    prefix = "model.language_model."
    tensors[prefix + "layers.0.linear_attn.A_log"] = np.float32([1 / 3, 1, 2, 3])
    # Between neighbours 2⁻⁷ apart in bfloat16: the ties go down to 1 and up to 1 + 4/256.
    ties = np.ones(14, np.float32)
    ties[:3] = 1 + 1 / 256, 1 + 3 / 256, 1 + 1.25 / 256
    tensors[prefix + "layers.1.self_attn.k_norm.weight"] = np.float32([3 / 1024] * 8)
    tensors[prefix + "embed_tokens.weight"] = np.tile(ties, (23, 1))
    weights = read_weights(written(tmp_path / "it", tensors), "bfloat16")
    assert {value.dtype for value in weights.values()} == {np.dtype(np.float64)}
    assert weights["embed_tokens.weight"][0, :3].tolist() == [1, 1 + 4 / 256, 1 + 2 / 256]
    assert weights["layers.0.linear_attn.A_log"][0] == np.float64(np.float32(1 / 3))
    assert weights["layers.1.self_attn.k_norm.weight"][0] == 1 + 3 / 1024  # bfloat16 cannot
    due = tensors[prefix + "layers.0.linear_attn.norm.weight"].astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(weights["layers.0.linear_attn.norm.weight"], due.astype(float))


def test_a_tied_head_is_the_embedding(tmp_path):
    tensors = drawn()
    del tensors["lm_head.weight"]
    config = {"text_config": TEXT | {"tie_word_embeddings": True}}
    tied = ReferenceRunner(written(tmp_path / "tied", tensors, config), "float32").run(build(IDS))
    embedding = tensors["model.language_model.embed_tokens.weight"].astype(np.float64)
    assert close(tied.get(0, "norm") @ embedding.T, tied.get(0, "logits"))


def test_a_missing_tensor_is_named(tmp_path):
    tensors = drawn()
    del tensors["model.language_model.layers.3.self_attn.v_proj.weight"]
    runner = ReferenceRunner(written(tmp_path / "missing", tensors), "float32")
    with pytest.raises(ValueError, match=r"has no layers\.3\.self_attn\.v_proj\.weight"):
        runner.run(build(IDS))


def test_what_it_cannot_read_is_refused(tmp_path):
    tensors = drawn()
    tensors["lm_head.weight"] = np.zeros((23, 2), np.uint32)
    with pytest.raises(ValueError, match=r"lm_head\.weight is uint32\. Give a model without"):
        ReferenceRunner(written(tmp_path / "quantized", tensors), "float32")
    twice = drawn() | {"language_model.lm_head.weight": np.zeros((23, 14), np.float32)}
    with pytest.raises(ValueError, match="comes twice"):
        ReferenceRunner(written(tmp_path / "twice", twice), "float32")


@pytest.mark.parametrize("entry", ["rope_parameters", "rope_scaling"])
@pytest.mark.parametrize("key", ["rope_type", "type"])
def test_another_rope_type_is_refused_wherever_it_stands(tmp_path, entry, key):
    yarn = TEXT | {entry: TEXT["rope_parameters"] | {key: "yarn"}}
    with pytest.raises(ValueError, match=r"rope_type is .'yarn'."):
        read_config(written(tmp_path / "yarn", drawn(), yarn))


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_parameters": {"rope_theta": 1e4}},
        {"full_attention_interval": ...},
        {"rope_parameters": {"rope_theta": 1e4}, "partial_rotary_factor": 0.5},
        {"rope_parameters": ..., "rope_theta": 1e4, "partial_rotary_factor": 0.5},
        {"rope_parameters": ..., "rope_scaling": {"type": "default", "rope_theta": 1e4}},
    ],
)
def test_what_is_left_out_is_read_as_the_implementation_reads_it(tmp_path, changes):
    tiny = suite.CHECKPOINTS["tiny"].text_config | {"layer_types": None} | changes
    text = {k: v for k, v in tiny.items() if v is not ...}
    config = {"model_type": "qwen3_5", "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps(config))
    theirs = parse_config(config, tmp_path)
    ours = read_config(tmp_path)
    for name in ("rotary_dim", "rope_theta", "layer_types"):
        assert ours[name] == getattr(theirs, name)


# Values that are no numbers.


@pytest.mark.parametrize(("value", "dtype"), [(np.nan, "float32"), (1e30, "float16")])
def test_a_weight_that_is_no_number_ends_in_nan_and_says_nothing(tmp_path, value, dtype):
    tensors = drawn()
    name = next(name for name in tensors if name.endswith("layers.0.mlp.gate_proj.weight"))
    tensors[name][0, 0] = value
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trace = ReferenceRunner(written(tmp_path / "nan", tensors), dtype).run(build(IDS))
    assert np.isnan(trace.get(0, "logits")).any()


# The file.


def test_it_is_one_short_file_that_shares_nothing():
    source = Path(reference.__file__).read_text(encoding="utf-8")
    assert len(source.splitlines()) < 300
    imported = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            imported.add(node.module)
    assert imported == {
        *("json", "collections.abc", "dataclasses", "pathlib", "typing"),
        *("ml_dtypes", "numpy", "safetensors", "parity.taps", "parity.trace"),
    }
