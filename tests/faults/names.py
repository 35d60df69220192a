"""Tensors that are read under another's name."""

from faults.fault import FULL, A, Fault, L, patched

import qwen35.load


def swapped(one, other):
    """Return a patch that loads each of two tensors of the trunk where the other is due."""

    def wrap(apply):
        def wrong(*args):
            weights = dict(apply(*args))
            names = [f"language_model.model.{name}.weight" for name in (one, other)]
            values = [weights[name] for name in names]
            return list((weights | dict(zip(names, values[::-1], strict=True))).items())

        return wrong

    return patched(qwen35.load, "apply", wrap)


FAULTS = {
    "query and key norms swapped": Fault(
        swapped(f"{FULL}{A}q_norm", f"{FULL}{A}k_norm"), f"{FULL}{A}q_norm"
    ),
    "the two norms of a block swapped": Fault(
        swapped("layers.0.input_layernorm", "layers.0.post_attention_layernorm"),
        "layers.0.input_layernorm",
    ),
    "decay and write strength swapped": Fault(
        swapped(f"layers.0.{L}in_proj_b", f"layers.0.{L}in_proj_a"), f"layers.0.{L}b"
    ),
    "gate and up projections swapped": Fault(
        swapped("layers.0.mlp.gate_proj", "layers.0.mlp.up_proj"), "layers.0.mlp.gate"
    ),
}
