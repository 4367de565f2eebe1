"""A growing key/value cache whose last rows can be trimmed.

The cache here and the one in windowed.py share one idea: a buffer with spare rows after its contents. New rows are
written into the spare rows in place, rows that turn out wrong are trimmed by moving the end back, and the rows of a
block that is only tried are written after the end and never counted. Targets and drafts use the same two classes.
Knows nothing of models; speaks the cache protocol of mlx-lm, so mlx-lm's models and its save functions take it.

Donation: an append is in place only while nobody else holds the buffer. So these classes keep the only reference,
hand out views only for the attention that follows, and no cache may be passed to mx.async_eval.
"""

import mlx.core as mx
from mlx_lm.models.cache import KVCache

GRANULE = 64  # rows; capacities are multiples of it


def round_up(rows: int) -> int:
    """Return the least capacity that holds this many rows."""
    return -(-rows // GRANULE) * GRANULE


def grown(buffer: mx.array | None, like: mx.array, kept: slice, capacity: int) -> mx.array:
    """Return a (B, H, capacity, d) buffer whose first rows are buffer's kept rows; like: (B, H, L, d) new rows."""
    B, H, _, d = like.shape
    larger = mx.zeros((B, H, capacity, d), like.dtype)
    if buffer is not None and kept.stop > kept.start:
        larger[..., : kept.stop - kept.start, :] = buffer[..., kept, :]
    return larger


class GrowingKVCache(KVCache):
    """Every row, from position 0: mlx-lm's KVCache with reserved room and geometric growth.

    keys, values: (B, H, capacity, d), of which the first `offset` rows count. A run of n tokens copies O(n) rows
    in all, where the fixed step of the parent class copies O(n^2 / 256).
    """

    def __init__(self):
        super().__init__()
        self._reserved = 0

    @classmethod
    def adopt(cls, cache: KVCache) -> "GrowingKVCache":
        """Return a cache that takes over the buffers of mlx-lm's KVCache."""
        return cls.from_state((cache.keys, cache.values, cache.offset))

    @property
    def state(self):
        """The rows that count (keys, values) and their number, as mlx-lm's KVCache stores them."""
        if self.keys is None:
            return None, None, 0
        return *self.keys_and_values(), self.offset

    @state.setter
    def state(self, state):
        self.keys, self.values, self.offset = state
        self._reserved = 0

    def reserve(self, rows: int) -> None:
        """Make the next growth large enough for this many rows in all."""
        self._reserved = max(self._reserved, rows)

    def _make_room(self, keys: mx.array, values: mx.array) -> None:
        needed = self.offset + keys.shape[2]
        capacity = 0 if self.keys is None else self.keys.shape[2]
        if needed > capacity:
            rows = round_up(max(needed, self._reserved, capacity + min(capacity // 4, 4096)))
            held = slice(0, self.offset)
            self.keys, self.values = grown(self.keys, keys, held, rows), grown(self.values, values, held, rows)

    def write_block(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Write a block's rows after the end without counting them.

        keys, values: (B, H, L, d). Returns views of offset + L rows, for the attention of this block only.
        """
        self._make_room(keys, values)
        end = self.offset + keys.shape[2]
        self.keys[..., self.offset : end, :] = keys
        self.values[..., self.offset : end, :] = values
        return self.keys[..., :end, :], self.values[..., :end, :]

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Append rows (B, H, L, d); return views of all rows."""
        fetched = self.write_block(keys, values)
        self.offset += keys.shape[2]
        return fetched

    @property
    def rows(self) -> int:
        """Number of rows of the buffers that count, from the first."""
        return self.offset

    def max_trim(self) -> int:
        """Return the number of last rows that can be trimmed."""
        return self.offset
