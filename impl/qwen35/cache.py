"""What a layer keeps between forwards."""

import mlx.core as mx
from jaxtyping import Float


class DeltaCache:
    """The state of a Gated DeltaNet layer: constant in size, whatever was seen.

    `conv_tail` [B, K-1, C] in the working dtype, `recurrent_state` [B, Hv, Dv, Dk] in f32; None
    stands for zeros before the first token. `offset` counts the tokens seen.
    """

    def __init__(self) -> None:
        self.conv_tail: mx.array | None = None
        self.recurrent_state: mx.array | None = None
        self.offset = 0

    def advance(self, tokens: int) -> None:
        """Count `tokens` more tokens as seen."""
        self.offset += tokens

    def arrays(self) -> list[mx.array]:
        """Return the arrays held."""
        return [x for x in (self.conv_tail, self.recurrent_state) if x is not None]


class KVCache:
    """Keys and values of an attention layer, [B, Hkv, T, D] in the working dtype.

    Buffers grow by whole blocks of `block` tokens, so a decode writes one row in place of copying
    what was there.
    """

    block = 256

    def __init__(self) -> None:
        self.offset = 0
        self._keys: mx.array | None = None
        self._values: mx.array | None = None

    def append(
        self, keys: Float[mx.array, "B Hkv S D"], values: Float[mx.array, "B Hkv S D"]
    ) -> tuple[Float[mx.array, "B Hkv T D"], Float[mx.array, "B Hkv T D"]]:
        """Append S tokens and return all T tokens' keys and values."""
        start, end = self.offset, self.offset + keys.shape[2]
        self._keys = self._with_room(self._keys, keys, end)
        self._values = self._with_room(self._values, values, end)
        self._keys[..., start:end, :] = keys
        self._values[..., start:end, :] = values
        self.offset = end
        return self._keys[..., :end, :], self._values[..., :end, :]

    def _with_room(self, buffer: mx.array | None, new: mx.array, end: int) -> mx.array:
        if buffer is not None and end <= buffer.shape[2]:
            return buffer
        rows, heads, _, size = new.shape
        seen = None if buffer is None else buffer[..., : self.offset, :]
        kept = 0 if seen is None else self.offset
        blocks = -(-(end - kept) // self.block)
        room = mx.zeros((rows, heads, blocks * self.block, size), new.dtype)
        return room if seen is None else mx.concatenate([seen, room], axis=2)

    def arrays(self) -> list[mx.array]:
        """Return the arrays held."""
        return [x for x in (self._keys, self._values) if x is not None]


LayerCache = DeltaCache | KVCache
Cache = list[LayerCache]
"""One entry a layer."""
