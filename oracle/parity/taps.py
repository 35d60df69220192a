"""The one list of taps: the tensors every runner records, in the order they are computed.

A tap's full name is `layers.{i}.{name}` for the layer taps and the bare name for the model's own.
Shapes use B rows, S new tokens, T tokens in the cache, H hidden, I intermediate, V vocabulary,
C convolution channels, n = K-1 kept rows, Hk/Hv linear key and value heads of Dk/Dv, Hq/Hkv
attention query and key-value heads of D. Layouts are the ones written here, in every runner.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

LINEAR, FULL = "linear_attention", "full_attention"


@dataclass(frozen=True)
class Tap:
    """One tensor of the model.

    `inputs` are the taps it is computed from (`<` marks the previous layer's output and `@` the
    same tap before this step), so a difference can be traced to the first operation that has
    equal inputs. `kind` groups taps that share their arithmetic, for the policy. `dtype` is what an
    MLX runner computes it in: `working` is the run's dtype.
    """

    name: str
    shape: str
    kind: str
    inputs: tuple[str, ...] = ()
    state: bool = False
    dtype: str = "working"


_HEAD = (Tap("embed_tokens", "B S H", "embedding"),)
_TAIL = (
    Tap("norm", "B S H", "norm", ("<output",)),
    Tap("logits", "B S V", "projection", ("norm",)),
)
_L = "linear_attn."
_LINEAR = (
    Tap("input_layernorm", "B S H", "norm", ("<output",)),
    Tap(_L + "qkv", "B S C", "projection", ("input_layernorm",)),
    Tap(_L + "z", "B S Hv Dv", "projection", ("input_layernorm",)),
    Tap(_L + "b", "B S Hv", "projection", ("input_layernorm",)),
    Tap(_L + "a", "B S Hv", "projection", ("input_layernorm",)),
    Tap(_L + "conv_tail", "B n C", "projection", (_L + "qkv", "@" + _L + "conv_tail"), state=True),
    Tap(_L + "conv_out", "B S C", "convolution", (_L + "qkv", "@" + _L + "conv_tail")),
    Tap(_L + "q", "B S Hk Dk", "qk_norm", (_L + "conv_out",)),
    Tap(_L + "k", "B S Hk Dk", "qk_norm", (_L + "conv_out",)),
    Tap(_L + "v", "B S Hv Dv", "convolution", (_L + "conv_out",)),
    Tap(_L + "beta", "B S Hv", "gate", (_L + "b",)),
    Tap(_L + "g", "B S Hv", "gate", (_L + "a",), dtype="float32"),
    Tap(
        _L + "y",
        "B S Hv Dv",
        "recurrence",
        (*(_L + x for x in ("q", "k", "v", "beta", "g")), "@" + _L + "recurrent_state"),
    ),
    Tap(
        _L + "recurrent_state",
        "B Hv Dv Dk",
        "recurrence",
        (*(_L + x for x in ("k", "v", "beta", "g")), "@" + _L + "recurrent_state"),
        state=True,
        dtype="float32",
    ),
    Tap(_L + "norm", "B S Hv Dv", "gated_norm", (_L + "y", _L + "z")),
    Tap(_L + "out", "B S H", "projection", (_L + "norm",)),
)
_A = "self_attn."
_FULL = (
    Tap("input_layernorm", "B S H", "norm", ("<output",)),
    Tap(_A + "q_proj", "B S Hq D", "projection", ("input_layernorm",)),
    Tap(_A + "gate", "B S Hq*D", "projection", ("input_layernorm",)),
    Tap(_A + "k_proj", "B S Hkv D", "projection", ("input_layernorm",)),
    Tap(_A + "v", "B S Hkv D", "projection", ("input_layernorm",)),
    Tap(_A + "q_norm", "B S Hq D", "norm", (_A + "q_proj",)),
    Tap(_A + "k_norm", "B S Hkv D", "norm", (_A + "k_proj",)),
    Tap(_A + "q_rope", "B Hq S D", "rope", (_A + "q_norm", "@" + _A + "offset")),
    Tap(_A + "k_rope", "B Hkv S D", "rope", (_A + "k_norm", "@" + _A + "offset")),
    Tap(_A + "offset", "B", "exact", ("@" + _A + "offset",), state=True, dtype="int32"),
    Tap(_A + "keys", "B Hkv T D", "rope", (_A + "k_rope", "@" + _A + "keys"), state=True),
    Tap(_A + "values", "B Hkv T D", "projection", (_A + "v", "@" + _A + "values"), state=True),
    Tap(_A + "attention", "B Hq S D", "attention", (_A + "q_rope", _A + "keys", _A + "values")),
    Tap(_A + "gated", "B S Hq*D", "attention", (_A + "attention", _A + "gate")),
    Tap(_A + "out", "B S H", "projection", (_A + "gated",)),
)


def _block(mixer: str) -> tuple[Tap, ...]:
    return (
        Tap("residual", "B S H", "residual", ("<output", mixer)),
        Tap("post_attention_layernorm", "B S H", "norm", ("residual",)),
        Tap("mlp.gate", "B S I", "projection", ("post_attention_layernorm",)),
        Tap("mlp.up", "B S I", "projection", ("post_attention_layernorm",)),
        Tap("mlp.act", "B S I", "mlp_act", ("mlp.gate", "mlp.up")),
        Tap("mlp.out", "B S H", "projection", ("mlp.act",)),
        Tap("output", "B S H", "residual", ("residual", "mlp.out")),
    )


LAYER_TAPS: dict[str, tuple[Tap, ...]] = {
    LINEAR: _LINEAR + _block(_L + "out"),
    FULL: _FULL + _block(_A + "out"),
}
"""Layer type (config.json's `layer_types`) -> its taps in order of computation."""

_LAYER = re.compile(r"layers\.(\d+)\.(.+)")


def split(name: str) -> tuple[int | None, str]:
    """Split a full tap name into its layer (None for the model's own taps) and the tap's name."""
    match = _LAYER.fullmatch(name)
    return (int(match[1]), match[2]) if match else (None, name)


def all_taps(layer_types: Sequence[str]) -> Iterator[tuple[str, Tap]]:
    """Yield (full name, tap) in order of computation for a model of these layer types."""
    yield from ((tap.name, tap) for tap in _HEAD)
    for i, kind in enumerate(layer_types):
        yield from ((f"layers.{i}.{tap.name}", tap) for tap in LAYER_TAPS[kind])
    yield from ((tap.name, tap) for tap in _TAIL)


@cache
def order(layer_types: tuple[str, ...]) -> dict[str, tuple[int, Tap]]:
    """Full name -> (position in the order of computation, tap)."""
    return {name: (at, tap) for at, (name, tap) in enumerate(all_taps(layer_types))}


def stream(layer: int) -> str:
    """Return the full name of the residual stream that feeds `layer`."""
    return "embed_tokens" if layer == 0 else f"layers.{layer - 1}.output"


def inputs(name: str, tap: Tap, layers: int) -> tuple[list[str], list[str]]:
    """Return the full names `name` is computed from: (in this step, in the step before)."""
    layer, _ = split(name)
    at = layers if layer is None else layer
    prefix = "" if layer is None else f"layers.{layer}."
    now, before = [], []
    for source in tap.inputs:
        if source.startswith("@"):
            before.append(prefix + source[1:])
        elif source == "<output":
            now.append(stream(at))
        else:
            now.append(prefix + source)
    return now, before
