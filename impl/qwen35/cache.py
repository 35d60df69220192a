"""The caches of all layers: one value that forwards advance and that can be cut, joined and kept.

Every change builds new entries and puts them in place at the end, so one that fails changes
nothing.
"""

from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import dataclass, replace

from qwen35.batch import chosen, joined
from qwen35.counts import Counts, checked
from qwen35.errors import CacheError
from qwen35.layer_cache import DeltaCache, KVCache, LayerCache
from qwen35.record import Round


@dataclass(frozen=True)
class Snapshot:
    """What a cache held at one moment, by reference; later steps do not change it."""

    layers: tuple[LayerCache, ...]
    rows: int | None


class Cache:
    """One entry a layer. `rows` is B, None until the first forward says it.

    `round` is the armed speculative round (see `qwen35.round`); while there is one, only forwards
    are allowed. `unusable` says why the cache can no longer be used.
    """

    def __init__(self, layers: Sequence[LayerCache], rows: int | None = None) -> None:
        self.layers = list(layers)
        self.rows = rows
        self.round: Round | None = None
        self.unusable: str | None = None

    def __iter__(self) -> Iterator[LayerCache]:
        return iter(self.layers)

    def __len__(self) -> int:
        return len(self.layers)

    def __getitem__(self, layer: int) -> LayerCache:
        return self.layers[layer]

    @property
    def offset(self) -> Counts:
        """The tokens seen, row by row."""
        return self.layers[0].offset

    def copies(self) -> list[LayerCache]:
        """Return a shallow copy of each entry."""
        return [copy(entry) for entry in self.layers]

    def begin(self, rows: int) -> list[LayerCache]:
        """Return copies of the entries for a forward of `rows` rows to advance.

        Raises CacheError if the cache is unusable, has another number of rows, or is in a round
        that has had its forward.
        """
        self.check_usable()
        if self.rows not in (None, rows):
            raise CacheError(f"the cache has {self.rows} rows and the forward {rows}: give each.")
        if self.round is not None and self.round.verified is not None:
            raise CacheError(
                "a second forward in one round: commit the round or accept tokens of it first."
            )
        return self.copies()

    def finish(self, layers: list[LayerCache], rows: int, tokens: Counts) -> None:
        """Put the entries of a forward of `tokens` tokens a row in place."""
        self.layers, self.rows = layers, rows
        if self.round is not None:
            self.round = replace(self.round, verified=tokens)

    def filter(self, rows: Sequence[int]) -> None:
        """Keep rows `rows`, in that order (a row may come twice)."""
        self._check_settled("filter")
        at = self._row_numbers(rows)
        self.layers = [chosen(entry, at, self.rows or 1) for entry in self.layers]
        self.rows = len(at)

    def extract(self, row: int) -> "Cache":
        """Return a cache of one row alone, without padding; this one stays."""
        self._check_settled("extract")
        at = self._row_numbers([row])
        return Cache([chosen(entry, at, self.rows or 1) for entry in self.layers], 1)

    def extend(self, other: "Cache") -> None:
        """Put the rows of `other` below these; `other` stays."""
        merged = Cache.merge([self, other])
        self.layers, self.rows = merged.layers, merged.rows

    @staticmethod
    def merge(caches: Sequence["Cache"]) -> "Cache":
        """Return a cache of all rows below each other; an empty cache counts as one row."""
        if not caches:
            raise CacheError("merge of no caches: give at least one.")
        for cache in caches:
            cache._check_settled("merge")
        if len({len(cache) for cache in caches}) > 1:
            raise CacheError("merge of caches of different depth: join caches of one model.")
        rows = [cache.rows or 1 for cache in caches]
        layers = zip(*(cache.layers for cache in caches), strict=True)
        return Cache([joined(entries, rows) for entries in layers], sum(rows))

    def snapshot(self) -> Snapshot:
        """Return what is held now, by reference."""
        self._check_settled("snapshot")
        return Snapshot(tuple(self.copies()), self.rows)

    def restore(self, snapshot: Snapshot) -> None:
        """Hold again what `snapshot` holds; it can be restored again."""
        self._check_settled("restore")
        self.layers, self.rows = [copy(entry) for entry in snapshot.layers], snapshot.rows

    def trim(self, tokens: int | Sequence[int]) -> None:
        """Forget the last `tokens` tokens, one count or one a row, of attention layers.

        Raises CacheError if there is a linear layer: its state holds no past to go back to.
        """
        self._check_settled("trim")
        if any(isinstance(entry, DeltaCache) for entry in self.layers):
            raise CacheError(
                "a linear layer cannot trim: arm a round before the forward and accept the tokens "
                "to keep (qwen35.round), or restore a snapshot."
            )
        counts = checked("trim", tokens, self.rows or 1, self.offset)
        layers = self.copies()
        for entry in layers:
            assert isinstance(entry, KVCache)
            entry.trim(counts)
        self.layers = layers

    def check_usable(self) -> None:
        """Raise CacheError if a rollback has failed half-way."""
        if self.unusable is not None:
            raise CacheError(f"the cache is unusable: {self.unusable}. Start with a new cache.")

    def _check_settled(self, operation: str) -> None:
        self.check_usable()
        if self.round is not None:
            raise CacheError(
                f"{operation} in a round: commit the round or accept tokens of it first."
            )

    def _row_numbers(self, rows: Sequence[int]) -> list[int]:
        count = self.rows or 1
        if not rows:
            raise CacheError("no rows: keep at least one.")
        for row in rows:
            if not 0 <= row < count:
                raise CacheError(f"row {row} of {count}: rows are numbered 0 to {count - 1}.")
        return list(rows)
