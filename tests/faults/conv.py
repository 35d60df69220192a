"""The rows that the convolution keeps."""

import mlx.core as mx
from faults.fault import Fault, L, patched

import qwen35.delta_net


def tail_rows(choose):
    return patched(qwen35.delta_net.GatedDeltaNet, "_owned_tail", lambda real: choose)


FAULTS = {
    "tail off by one": Fault(
        tail_rows(lambda self, w: mx.contiguous(w[:, w.shape[1] - self.kept - 1 : -1])),
        f"layers.0.{L}conv_tail",
    ),
    "tail order reversed": Fault(
        tail_rows(lambda self, w: mx.contiguous(w[:, : w.shape[1] - self.kept - 1 : -1])),
        f"layers.0.{L}conv_tail",
    ),
}
