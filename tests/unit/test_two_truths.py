"""The reference against transformers' own code in float64: two truths that share no line."""

import numpy as np
import pytest

from parity import reference, suite
from parity.bits import relative_rms
from parity.export import Recipe, convert, export
from parity.program import build
from parity.reference import ReferenceRunner
from parity.runners.transformers import TransformersRunner
from parity.taps import all_taps
from qwen35.headers import open_checkpoint

# Both round at 1.1e-16; measured over all of the cases below, the worst tap is 3.4e-14 apart.
AGREE = 1e-12

RECIPES = {
    name: Recipe(name, plan.text_config, qk_scale=plan.qk_scale)
    for name, plan in suite.CHECKPOINTS.items()
}
PROGRAMS = {
    "one-shot": {"tokens": 17, "decode": 0, "chunk": None},
    "decode": {"tokens": 9, "decode": 4, "chunk": None},
    "chunk-2": {"tokens": 11, "decode": 2, "chunk": 2},
    "chunk-66": {"tokens": 70, "decode": 2, "chunk": 66},  # past a chunk of transformers' rule, 64
}
CASES = [(label, dtype) for label in RECIPES for dtype in ("float32", "bfloat16")]
CASES.remove(("heads-0.8b", "bfloat16"))  # the same code as in float32, at ten times the cost


def program(name, rows=2):
    plan = PROGRAMS[name]
    ids = np.random.default_rng(len(name)).integers(0, 131, (rows, plan["tokens"])).tolist()
    return build(ids, plan["decode"], plan["chunk"])


class Truths:
    """Checkpoints and transformers' float64 traces of them, each made once."""

    def __init__(self, folder):
        self.folder, self.traces, self.runners = folder, {}, {}

    def path(self, label):
        path = self.folder / label
        return path if path.exists() else export(RECIPES[label], path, "float32")

    def transformers(self, label, dtype, name):
        if (label, dtype) not in self.runners:
            checkpoint = open_checkpoint(self.path(label))
            self.runners[label, dtype] = TransformersRunner(checkpoint, dtype, "float64")
        if (label, dtype, name) not in self.traces:
            trace = self.runners[label, dtype].run(program(name))
            self.traces[label, dtype, name] = trace
        return self.traces[label, dtype, name]

    def reference(self, label, dtype, name):
        return ReferenceRunner(self.path(label), dtype).run(program(name))


@pytest.fixture(scope="module")
def truths(tmp_path_factory):
    return Truths(tmp_path_factory.mktemp("truths"))


def apart(ours, theirs):
    """Return [(relative RMS, forward, tap)] of the pairs above AGREE, in order of computation."""
    forwards = 1 + max(forward for forward, _ in theirs.tensors)
    out = []
    for forward in range(forwards):
        for tap, _ in all_taps(theirs.layer_types):
            error = relative_rms(ours.tensors[forward, tap], theirs.tensors[forward, tap])
            if not error <= AGREE:
                out.append((error, forward, tap))
    return out


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize(("label", "dtype"), CASES)
def test_two_truths_agree_on_every_tap(truths, label, dtype, name):
    ours = truths.reference(label, dtype, name)
    theirs = truths.transformers(label, dtype, name)
    spelled = lambda trace: {key: (v.shape, v.dtype) for key, v in trace.tensors.items()}
    assert spelled(ours) == spelled(theirs)
    assert apart(ours, theirs) == []


def test_small_qk_is_small(truths):
    # Otherwise the case says nothing of eps: it would vanish beside the sum of squares.
    conv = truths.transformers("small-qk", "float32", "one-shot").get(
        0, "layers.0.linear_attn.conv_out"
    )
    q, k = (conv[..., at : at + 36].reshape(2, 17, 3, 12) for at in (0, 36))
    for x in (q, k):
        assert 2e-4 < np.median(np.linalg.norm(x, axis=-1)) < 5e-3


def l2_norm_eps_on_the_mean(x):
    return x / np.sqrt(np.mean(x * x, -1, keepdims=True) + 1e-6) * x.shape[-1] ** -0.5


def heads_by_tiling(x, times, axis):
    return np.concatenate([x] * times, axis)


def conv_reversed(window, weight, causal_conv=reference.causal_conv):
    return causal_conv(window, weight[:, ::-1])


def rule_that_recalls_before_it_decays(q, k, v, g, beta, state):
    y = np.empty_like(v)
    for t in range(v.shape[1]):
        delta = (v[:, t] - (state @ k[:, t, :, :, None])[..., 0]) * beta[:, t, :, None]
        state = state * g[:, t, :, None, None] + delta[..., None] * k[:, t, :, None]
        y[:, t] = (state @ q[:, t, :, :, None])[..., 0]
    return y, state


def rope_of_neighbours(x, positions, theta, rotary_dim):
    angles = positions[:, None] * theta ** (-np.arange(0, rotary_dim, 2) / rotary_dim)
    turned = x.copy()
    even, odd = x[..., 0:rotary_dim:2], x[..., 1:rotary_dim:2]
    turned[..., 0:rotary_dim:2] = even * np.cos(angles) - odd * np.sin(angles)
    turned[..., 1:rotary_dim:2] = odd * np.cos(angles) + even * np.sin(angles)
    return turned


def rope_with_float32_frequencies(x, positions, theta, rotary_dim):
    half = rotary_dim // 2
    frequencies = (theta ** (-np.arange(half) / half)).astype(np.float32)
    cos, sin = np.cos(positions[:, None] * frequencies), np.sin(positions[:, None] * frequencies)
    x1, x2, rest = np.split(x, [half, rotary_dim], axis=-1)
    return np.concatenate([x1 * cos - x2 * sin, x2 * cos + x1 * sin, rest], axis=-1)


FAULTS = {
    "eps on the mean": ("l2_norm", l2_norm_eps_on_the_mean, "layers.0.linear_attn.q"),
    "tiled heads": ("repeat_heads", heads_by_tiling, "layers.0.linear_attn.y"),
    "reversed filter": ("causal_conv", conv_reversed, "layers.0.linear_attn.conv_out"),
    "decay last": (
        "gated_delta_rule",
        rule_that_recalls_before_it_decays,
        "layers.0.linear_attn.y",
    ),
    "neighbouring pairs": ("rope", rope_of_neighbours, "layers.3.self_attn.q_rope"),
    "float32 frequencies": (
        "rope",
        rope_with_float32_frequencies,
        "layers.3.self_attn.q_rope",
    ),
    "unshifted k_norm": (
        "_ZERO_CENTRED",
        ("input_layernorm", "post_attention_layernorm", "q_norm"),
        "layers.3.self_attn.k_norm",
    ),
    "shifted gated norm": (
        "_ZERO_CENTRED",
        (*reference._ZERO_CENTRED, "linear_attn.norm"),
        "layers.0.linear_attn.norm",
    ),
}


@pytest.mark.parametrize(("attribute", "faulty", "tap"), FAULTS.values(), ids=FAULTS)
def test_a_fault_in_the_reference_is_seen_at_its_tap(truths, monkeypatch, attribute, faulty, tap):
    theirs = truths.transformers("tiny", "float32", "one-shot")
    monkeypatch.setattr(reference, attribute, faulty)
    ours = truths.reference("tiny", "float32", "one-shot")
    error, forward, first = apart(ours, theirs)[0]
    assert (forward, first) == (0, tap)
    assert error > 100 * AGREE


def test_mlx_lms_own_conversion_is_the_same_model(truths):
    converted = convert(truths.path("tiny"), truths.folder / "converted")
    ours = ReferenceRunner(converted, "float32").run(program("one-shot"))
    theirs = truths.transformers("tiny", "float32", "one-shot")
    assert ours.tensors.keys() == theirs.tensors.keys()
    # Conversion rounds 1 + w to float32: 6e-8 for each gain, and nothing else.
    assert relative_rms(ours.get(0, "embed_tokens"), theirs.get(0, "embed_tokens")) == 0
    assert 0 < relative_rms(ours.get(0, "logits"), theirs.get(0, "logits")) < 1e-6
