"""A sliding window whose last rows can be trimmed, in temporal order.

The buffer and the rules for its growth are those of growing.py; the window also knows which rows a query may see.
Knows nothing of models; speaks the cache protocol of mlx-lm.
"""

import mlx.core as mx
from mlx_lm.models.base import create_causal_mask
from mlx_lm.models.cache import RotatingKVCache

from .growing import grown, round_up


class WindowedKVCache(RotatingKVCache):
    """The last rows only, in temporal order: a sliding window that can be trimmed.

    keys, values: (B, H, capacity, d), of which rows [0, offset - start) count; row j holds position start + j. The
    first `keep` positions stay for ever, in a buffer of their own once start > 0, and count against max_size.
    A query at position p sees the kept positions and p - max_size + keep + 1 to p, as in mlx-lm's one-row steps; when
    not is_stepwise it sees what mlx-lm lets a row of a prefill chunk see. Up to `slack` of the last rows can be
    trimmed without losing what the rows before them see; mlx-lm's RotatingKVCache has overwritten those by then.
    This is a subclass because some models ask which cache is a rotating one; it shares no behaviour with its parent.
    """

    def __init__(self, max_size: int, slack: int = 64, keep: int = 0):
        super().__init__(max_size, keep)
        self.start = 0
        self.slack = slack
        self.is_stepwise = True
        self._shown = 0  # first position that the latest update_and_fetch returned, but for the kept ones
        self._first_keys = self._first_values = None

    @classmethod
    def adopt(cls, cache: RotatingKVCache, slack: int = 64) -> "WindowedKVCache":
        """Return a cache that takes over the contents of mlx-lm's RotatingKVCache, put into temporal order."""
        windowed = cls(cache.max_size, slack, cache.keep)
        if cache.keys is not None:
            keys, values = cache._temporal_order(cache.keys), cache._temporal_order(cache.values)
            windowed.offset, windowed.start = cache.offset, cache.offset - keys.shape[2]
            if windowed.start and cache.keep:
                windowed._first_keys, windowed._first_values = keys[..., : cache.keep, :], values[..., : cache.keep, :]
                keys, values = keys[..., cache.keep :, :], values[..., cache.keep :, :]
                windowed.start += cache.keep
            windowed.keys, windowed.values = keys, values
        return windowed

    @property
    def state(self):
        """As mlx-lm's RotatingKVCache stores it: keys, values, offset, keep, max_size, index of the next row."""
        if self.keys is None:
            return None, None, self.offset, self.keep, self.max_size, 0
        first = max(self.start, self.offset - self.max_size + self.keep)
        keys, values = self._seen(first if first > self.keep else 0, self.offset)
        return keys, values, self.offset, self.keep, self.max_size, keys.shape[2]

    @state.setter
    def state(self, state):
        keys, values, offset, keep, max_size, index = state
        stock = RotatingKVCache(max_size, keep)
        stock.keys, stock.values, stock.offset, stock._idx = keys, values, offset, index
        self.__dict__.update(self.adopt(stock).__dict__)

    def reserve(self, rows: int) -> None:
        """Nothing to do: the size is bounded."""

    def size(self) -> int:
        """Return the number of rows that are seen."""
        return min(self.offset, self.max_size)

    @property
    def rows(self) -> int:
        """Number of rows of the buffers that count, from the first; only the last max_size of them are seen."""
        return self.offset - self.start

    def first_position(self, rows: int) -> int:
        """Return the first position, apart from the kept ones, that a block of this many rows at the end attends to."""
        first = max(self.start, self.offset - self.max_size + self.keep + 1)
        return first if first > self.keep else 0

    def _make_room(self, keys: mx.array, values: mx.array) -> None:
        rows, new = self.offset - self.start, keys.shape[2]
        capacity = 0 if self.keys is None else self.keys.shape[2]
        if rows + new <= capacity:
            return
        # Keep what can still be seen after the longest trim that is allowed.
        first = max(self.start, self.offset - self.max_size - self.slack)
        if self.keep and self.start == 0 and first > 0:
            first = max(first, self.keep)
            self._first_keys, self._first_values = (
                mx.contiguous(x[..., : self.keep, :]) for x in (self.keys, self.values)
            )
        held = slice(first - self.start, rows)
        spare = max(self.slack, min(self.max_size, self.offset) // 4)
        capacity = round_up(held.stop - held.start + new + spare)
        self.keys, self.values = grown(self.keys, keys, held, capacity), grown(self.values, values, held, capacity)
        self.start = first

    def _seen(self, first: int, end: int) -> tuple[mx.array, mx.array]:
        """Return the kept rows, and those of positions first to end - 1."""
        rows = slice(first - self.start, end - self.start)
        keys, values = self.keys[..., rows, :], self.values[..., rows, :]
        if self.keep == 0 or first == 0:
            return keys, values
        kept = slice(0, self.keep)
        first_keys, first_values = (
            (self.keys, self.values) if self.start == 0 else (self._first_keys, self._first_values)
        )
        return mx.concatenate([first_keys[..., kept, :], keys], 2), mx.concatenate(
            [first_values[..., kept, :], values], 2
        )

    def write_block(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Write a block's rows after the end without counting them.

        keys, values: (B, H, L, d). Returns the kept rows and those from first_position(L) on, for the attention of
        this block.
        """
        self._make_room(keys, values)
        end = self.offset + keys.shape[2]
        rows = slice(self.offset - self.start, end - self.start)
        self.keys[..., rows, :] = keys
        self.values[..., rows, :] = values
        return self._seen(self.first_position(keys.shape[2]), end)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Append rows (B, H, L, d); return the rows that they attend to."""
        self._shown = self.first_position(keys.shape[2])
        fetched = self.write_block(keys, values)
        self.offset += keys.shape[2]
        return fetched

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """Return what the latest update_and_fetch returned, for layers that share the rows of another layer."""
        return self._seen(self._shown, self.offset)

    def make_mask(self, N: int, window_size: int | None = None, return_array: bool = False):
        """Return the attention mask of the next N rows over what update_and_fetch will return for them."""
        window = window_size or self.max_size
        first = self.first_position(N)
        before = self.offset if first == 0 else self.offset - first + self.keep
        if self.is_stepwise or N == 1:
            window = min(window, self.max_size)
        if before + N <= window:
            if N == 1:
                return None
            return create_causal_mask(N, before) if return_array else "causal"
        mask = create_causal_mask(N, before, window_size=window - self.keep if self.is_stepwise or N == 1 else window)
        if self.keep and (self.is_stepwise or N == 1):
            columns = mx.arange(before + N)
            mask = mask | ((columns < self.keep) & (columns <= mx.arange(before, before + N)[:, None]))
        return mask

    def is_trimmable(self) -> bool:
        """Whether any number of rows can be trimmed, which is what mlx-lm asks; see max_trim."""
        return self.start == 0

    def max_trim(self) -> int:
        """Return the number of last rows that can be trimmed without losing what the rows before them see."""
        return self.offset if self.start == 0 else self.offset - self.start - self.max_size + self.keep

    def trim(self, n: int) -> int:
        """Trim the last n rows, or as many of them as can be trimmed; return their number."""
        n = min(n, self.max_trim())
        self.offset -= n
        return n
