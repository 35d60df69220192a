"""What is kept between forwards, and the growth of the buffers of keys and values."""

import mlx.core as mx
from faults.fault import CHUNKS, FULL, A, Fault, L, patched

from qwen35.layer_cache import DeltaCache, KVCache

GROWTH = {"grow-at-decode": 4, "grow-in-chunk": 2}
"""Program -> the forward in which the 257th token comes."""


def forgets(slot):
    """Return a patch that loses one slot of a linear layer's cache after every forward."""
    return patched(
        DeltaCache, "advance", lambda real: lambda self, tokens: setattr(self, slot, None)
    )


def offset_stays(mp):
    real = KVCache.append

    def append(self, keys, values):
        result = real(self, keys, values)
        self.offset = 0
        return result

    mp.setattr(KVCache, "append", append)


def grown(change):
    """Return a patch of the buffer after it grew: change(buffer, tokens seen)."""

    def wrap(real):
        def with_room(self, buffer, new, end):
            made = real(self, buffer, new, end)
            grew = buffer is not None and made.shape != buffer.shape
            return change(made, self.width) if grew else made

        return with_room

    return patched(KVCache, "_with_room", wrap)


def last_lost(buffer, seen):
    return mx.concatenate(
        [buffer[..., : seen - 1, :], mx.zeros_like(buffer[..., seen - 1 :, :])], axis=2
    )


FAULTS = {
    "state not kept": Fault(forgets("recurrent_state"), f"layers.0.{L}y", CHUNKS, step=1),
    "tail not kept": Fault(forgets("conv_tail"), f"layers.0.{L}conv_out", CHUNKS, step=1),
    "offset not advanced": Fault(offset_stays, f"{FULL}{A}offset"),
    **{
        f"{what}, {program}": Fault(
            grown(change), f"layers.1.{A}keys", ("tiny-k3", "float32", program), step
        )
        for program, step in GROWTH.items()
        for what, change in {
            "growth loses all": lambda buffer, seen: mx.zeros_like(buffer),
            "growth loses the last token": last_lost,
        }.items()
    },
}
