"""Hypothesis strategies that tests share, drawn in dependency order and without filters."""

import json
import struct
from typing import Any

from hypothesis import strategies as st

SIZES = {"F32": 4, "F16": 2, "BF16": 2, "U32": 4, "U8": 1}
"""safetensors dtype -> bytes an element, for the dtypes that are drawn."""


def safetensors_file(header: Any, data: bytes = b"", length: int | None = None) -> bytes:
    """Return a file with this header (encoded, or an object to encode) and a stated length."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


@st.composite
def safetensors_headers(draw: st.DrawFn) -> dict[str, Any]:
    """Draw a truthful header of up to four tensors, scalars and empty ones included."""
    names = draw(st.lists(st.text('ab.λ"', min_size=1, max_size=6), unique=True, max_size=4))
    header: dict[str, Any] = draw(st.sampled_from([{}, {"__metadata__": {"format": "pt"}}]))
    header, at = dict(header), 0
    for name in names:
        dtype = draw(st.sampled_from(sorted(SIZES)))
        shape = draw(st.lists(st.integers(0, 3), max_size=3))
        size = SIZES[dtype]
        for n in shape:
            size *= n
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + size]}
        at += size
    return header


def data_size(header: dict[str, Any]) -> int:
    """Return the bytes of data that a truthful header asks for."""
    return max([e["data_offsets"][1] for n, e in header.items() if n != "__metadata__"], default=0)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=8,
)
"""Any JSON value, Python's NaN and infinities included."""

_PREFIXES = (
    "",
    "model.",
    "model.language_model.",
    "language_model.",
    "language_model.model.",
    "vision_tower.",
    "model.visual.",
    # Near misses: what a loader asks for is a prefix, without the dot or with it.
    "vision_towers.",
    "model.visuals.",
    "model.language_models.",
    "language_models.",
)
_GAINS = (
    "norm.weight",
    "layers.0.input_layernorm.weight",
    "layers.0.post_attention_layernorm.weight",
    "layers.1.self_attn.q_norm.weight",
    "layers.1.self_attn.k_norm.weight",
    "layers.0.linear_attn.norm.weight",
    "layers.1.self_attn.xq_norm.weight",
    "layers.1.self_attn.xk_norm.weight",
    "layers.0.xinput_layernorm.weight",
    "layers.0.xpost_attention_layernorm.weight",
    "layers.0.xmodel.norm.weight",
)
_LEAVES = (
    "layers.0.linear_attn.conv1d.weight",
    "layers.1.linear_attn.conv1d.weight",
    "layers.0.linear_attn.conv1d.weight.x",
    "layers.0.linear_attn.conv1d_weight",
    "layers.0.mlp.experts.gate_up_proj",
    "lm_head.weight",
    "xmtp.y",
    "mtpx.y",
    "layers.0.mtp_norm.weight",
    "mtp.layers.0.input_layernorm.weight",
    "mtp.norm.weight",
    "mtp.conv1d.weight",
    "x.model.language_model.norm.weight",
)


@st.composite
def name_maps(draw: st.DrawFn) -> dict[str, tuple[int, ...]]:
    """Draw tensor names of both generations, well mixed and in any order, with shapes.

    Each name has another leaf, so no two fold onto one; what mlx-lm takes for a conv weight has
    three axes, as it would fail on fewer.
    """
    leaves = draw(st.lists(st.sampled_from(_GAINS), unique=True, min_size=2, max_size=7))
    leaves += draw(st.lists(st.sampled_from(_LEAVES), unique=True, max_size=5))
    prefix = st.sampled_from(_PREFIXES[:5]) | st.sampled_from(_PREFIXES)
    # All convs converted, or any: otherwise few maps would ask for no shift, or for one.
    conv = st.sampled_from([(6, 4, 1), (6, 1, 1)] + [(6, 1, 4), (1, 4, 1)] * draw(st.booleans()))
    if draw(st.booleans()):
        # A draft head's counts too, though it is dropped.
        conv_leaf = st.sampled_from(["layers.2.linear_attn.", "mtp.layers.0."])
        leaves.append(draw(conv_leaf) + "conv1d.weight")
        conv |= st.just((6, 1, 4))
    other = st.sampled_from([(4,), (4,), (4,), (3, 2), (6, 1, 4), (6, 4, 1)])
    return {
        draw(prefix) + leaf: draw(conv if "conv1d.weight" in leaf else other)
        for leaf in draw(st.permutations(leaves))
    }
