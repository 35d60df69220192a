"""What one layer keeps between forwards.

An entry is changed only by the forward that made a copy of it; arrays are immutable, so copies and
snapshots hold references.
"""

import mlx.core as mx
import numpy as np
from jaxtyping import Float

from qwen35.counts import Counts, of_rows, settled
from qwen35.record import Record


class DeltaCache:
    """The state of a Gated DeltaNet layer: constant in size, whatever was seen.

    `conv_tail` [B, K-1, C] in the working dtype, `recurrent_state` [B, Hv, Dv, Dk] in f32; None
    stands for zeros before the first token. `offset` counts the tokens seen, row by row. While
    `armed`, the layer leaves a `record` of its forward.
    """

    def __init__(self) -> None:
        self.conv_tail: mx.array | None = None
        self.recurrent_state: mx.array | None = None
        self.offset: Counts = 0
        self.armed = False
        self.record: Record | None = None

    def advance(self, tokens: Counts) -> None:
        """Count `tokens` more tokens as seen."""
        self.offset = settled(self.offset + tokens)

    def arrays(self) -> list[mx.array]:
        """Return the arrays held."""
        return [x for x in (self.conv_tail, self.recurrent_state) if x is not None]


class KVCache:
    """Keys and values of an attention layer, [B, Hkv, T, D] in the working dtype.

    Columns 0 … width−1 are in use. The last `offset` of them are a row's tokens, those before are
    its left padding: zeros, which attention masks. Buffers grow by whole blocks of `block` tokens,
    so a decode writes one row in place of copying what was there.
    """

    block = 256

    def __init__(
        self,
        keys: Float[mx.array, "B Hkv T D"] | None = None,
        values: Float[mx.array, "B Hkv T D"] | None = None,
        offset: Counts = 0,
    ) -> None:
        self.width = 0 if keys is None else keys.shape[2]
        self.offset = offset
        self._keys = keys
        self._values = values

    @property
    def left_padding(self) -> Counts:
        """The columns of each row before its first token."""
        return self.width - self.offset

    @property
    def keys(self) -> mx.array | None:
        """The keys in use, [B, Hkv, T, D]; None before the first forward."""
        return None if self._keys is None else self._keys[..., : self.width, :]

    @property
    def values(self) -> mx.array | None:
        """The values in use, [B, Hkv, T, D]; None before the first forward."""
        return None if self._values is None else self._values[..., : self.width, :]

    def append(
        self, keys: Float[mx.array, "B Hkv S D"], values: Float[mx.array, "B Hkv S D"]
    ) -> tuple[Float[mx.array, "B Hkv T D"], Float[mx.array, "B Hkv T D"]]:
        """Append S tokens and return all T columns' keys and values."""
        start, end = self.width, self.width + keys.shape[2]
        self._keys = self._with_room(self._keys, keys, end)
        self._values = self._with_room(self._values, values, end)
        self._keys[..., start:end, :] = keys
        self._values[..., start:end, :] = values
        self.width, self.offset = end, self.offset + keys.shape[2]
        return self._keys[..., :end, :], self._values[..., :end, :]

    def _with_room(self, buffer: mx.array | None, new: mx.array, end: int) -> mx.array:
        if buffer is not None and end <= buffer.shape[2]:
            # Writing to a slice changes what the Python object stands for; copies and snapshots
            # share the object, so write to a new one. No data is copied.
            return buffer[...]
        rows, heads, _, size = new.shape
        seen = None if buffer is None else buffer[..., : self.width, :]
        kept = 0 if seen is None else self.width
        blocks = -(-(end - kept) // self.block)
        room = mx.zeros((rows, heads, blocks * self.block, size), new.dtype)
        return room if seen is None else mx.concatenate([seen, room], axis=2)

    def drop_right_padding(self, padding: np.ndarray) -> None:
        """Turn the last `padding` [B] columns of each row into left padding."""
        self.realign(self.left_padding, self.offset - padding, self.width)

    def trim(self, tokens: Counts) -> None:
        """Forget the last `tokens` of each row."""
        least = int(np.min(tokens))
        self.realign(self.left_padding, self.offset - tokens, self.width - least)

    def realign(self, start: Counts, offset: Counts, width: int) -> None:
        """Keep, of each row, the `offset` tokens from column `start` on, as the last of `width`."""
        held = self.arrays()
        if held and np.any(start != width - offset):
            rows = held[0].shape[0]
            first = of_rows(width - offset, rows)[:, None]
            column = np.arange(width)[None]
            # Padding reads column 0 and is replaced by zeros: 0 · NaN would pass an attention mask.
            source = np.where(column < first, 0, column - first + of_rows(start, rows)[:, None])
            index = mx.array(source.astype(np.int32))[:, None, :, None]
            real = mx.array(column >= first)[:, None, :, None]
            self._keys, self._values = (
                mx.where(real, mx.take_along_axis(buffer, index, axis=2), 0) for buffer in held
            )
        self.width, self.offset = width, settled(offset)

    def row(self, row: int) -> tuple[mx.array, mx.array]:
        """Return one row's keys and values without padding, [Hkv, offset, D]."""
        assert self._keys is not None
        assert self._values is not None
        start = int(of_rows(self.left_padding, self._keys.shape[0])[row])
        keys, values = (x[row, :, start : self.width] for x in (self._keys, self._values))
        return keys, values

    def arrays(self) -> list[mx.array]:
        """Return the arrays held."""
        return [x for x in (self._keys, self._values) if x is not None]


LayerCache = DeltaCache | KVCache
