"""Loading: the shift of the gains, the axis of the conv weights, the dtypes."""

import sys

import mlx.core as mx
from faults.fault import BF16, Fault, L, loaded

import qwen35.load


def conv_axis_wrong(name, value, entry):
    if not name.endswith("conv1d.weight"):
        return value
    channels, kernel, _ = value.shape
    return value.reshape(kernel, channels, 1).transpose(1, 0, 2)


def nothing_keeps_its_dtype(mp):
    # In every module that has the name: an oracle that took it from here would be wrong as well.
    for module in list(sys.modules.values()):
        if module is not None and "KEEPS_DTYPE" in vars(module):
            mp.setattr(module, "KEEPS_DTYPE", ".no_such_parameter")


def bfloat16_is_float16(mp):
    mp.setitem(qwen35.load.DTYPES, "bfloat16", mx.float16)


FAULTS = {
    "shift applied twice": Fault(
        loaded(lambda n, v, e: v + 1 if e.add_one else v), "layers.0.input_layernorm"
    ),
    "shift missed": Fault(
        loaded(lambda n, v, e: v - 1 if e.add_one else v), "layers.0.input_layernorm"
    ),
    "gated norm shifted": Fault(
        loaded(lambda n, v, e: v + 1 if n.endswith(f"{L}norm.weight") else v),
        f"layers.0.{L}norm",
    ),
    "conv weight axis wrong": Fault(loaded(conv_axis_wrong), f"layers.0.{L}conv_out"),
    # g's error stays at 6.0e-4, transformers' own being 3.4e-4: its softplus in bfloat16 hides it.
    "A_log cast to the working dtype": Fault(
        nothing_keeps_its_dtype, f"layers.0.{L}g", BF16, transformers_too=False
    ),
    "bfloat16 loaded as float16": Fault(bfloat16_is_float16, "embed_tokens", BF16, verdict="dtype"),
}
