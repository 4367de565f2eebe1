"""How the caches of a target go back to an earlier token, per kind of cache.

Rows that were appended are cut off. Any other state goes back to what it was before the pass: arrays are values, so
keeping it costs a reference. From there the kept tokens are put in front of the next pass, or, where the layers are
a short convolution and a recurrence that mlx-lm has as a function, only these run again over the kept rows.
Knows the cache classes of mlx-lm and ours, and what mlx-lm's recurrent layers call; knows nothing of rounds.
"""

import copy
from collections.abc import Iterator
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import (
    CacheList,
    ChunkedKVCache,
    ConcatenateKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
)

from .growing import GrowingKVCache
from .windowed import WindowedKVCache

_ROW_CACHES = (GrowingKVCache, WindowedKVCache, QuantizedKVCache, ChunkedKVCache, ConcatenateKVCache)


def adopt(caches: list[Any], slack: int) -> None:
    """Replace, in place, mlx-lm's caches by ours where those cannot take back up to `slack` rows.

    Raises ValueError that names the class of a cache whose state cannot be kept.
    """
    for i, cache in enumerate(caches):
        caches[i] = _adopted(cache, slack)


def _adopted(cache: Any, slack: int) -> Any:
    kind = type(cache)
    if kind is KVCache:
        return GrowingKVCache.adopt(cache)
    if kind is RotatingKVCache:
        return WindowedKVCache.adopt(cache, slack)
    if kind is WindowedKVCache:
        cache.slack = max(cache.slack, slack)
    elif kind is CacheList:
        cache.caches = tuple(_adopted(c, slack) for c in cache.caches)
    elif not hasattr(cache, "__dict__"):
        raise ValueError(
            f"the target keeps a {kind.__name__}, whose state cannot be kept; expected an object with attributes"
        )
    return cache


def leaves(caches: list[Any]) -> Iterator[Any]:
    """The caches, with those inside a CacheList in its place."""
    for cache in caches:
        if isinstance(cache, CacheList):
            yield from leaves(cache.caches)
        else:
            yield cache


def lengths(caches: list[Any]) -> list[int]:
    """Return the number of tokens that each cache covers, without the caches that do not know."""
    known = (getattr(c, "offset", None) for c in leaves(caches))
    return [n for n in known if isinstance(n, int)]


def set_stepwise(caches: list[Any], is_stepwise: bool) -> None:
    """Let windows treat the rows of a pass as one-row steps of mlx-lm would, or as a chunk of its prefill."""
    for cache in leaves(caches):
        if isinstance(cache, WindowedKVCache):
            cache.is_stepwise = is_stepwise


def can_drop_rows(caches: list[Any], rows: int) -> bool:
    """Whether every cache can take back this many of its last rows."""
    return rows == 0 or all(type(c) in _ROW_CACHES and (c.offset == 0 or rows <= _max_drop(c)) for c in leaves(caches))


def drop_rows(caches: list[Any], rows: int) -> None:
    """Take back the last rows of every cache."""
    cut(caches, max(lengths(caches), default=0) - rows)


def cut(caches: list[Any], length: int) -> None:
    """Let the caches that keep rows hold those of the first `length` tokens only."""
    for cache in leaves(caches):
        rows = cache.offset - length if type(cache) in _ROW_CACHES else 0
        if rows <= 0:
            continue
        assert rows <= _max_drop(cache), f"{type(cache).__name__} has {_max_drop(cache)} rows to give, not {rows}"
        if isinstance(cache, ConcatenateKVCache):
            # Its own trim forgets to cut the arrays.
            cache.keys, cache.values = cache.keys[..., :length, :], cache.values[..., :length, :]
            cache.offset = length
        else:
            cache.trim(rows)


def _max_drop(cache: Any) -> int:
    return cache.max_trim() if hasattr(cache, "max_trim") else cache.offset - getattr(cache, "start_position", 0)


class Checkpoint:
    """The caches as they were before a pass, when they covered `length` tokens.

    Rows are not kept, they can be cut off; unless `with_windows`, for passes longer than the slack of the windows.
    """

    def __init__(self, caches: list[Any], length: int, with_windows: bool = False):
        self.length = length
        self._caches = list(caches)
        copied = (
            c for c in leaves(caches) if type(c) not in _ROW_CACHES or with_windows and isinstance(c, WindowedKVCache)
        )
        # The caches that do not keep rows, each with its state.
        self.recurrent = [(cache, _copied(cache.__dict__)) for cache in copied]

    def put_back(self, caches: list[Any]) -> None:
        """Put the cache objects back into their list, as they are now."""
        caches[:] = self._caches

    def restore(self, caches: list[Any]) -> None:
        """Put the caches back into their list, in the state that they had."""
        self.put_back(caches)
        for cache, state in self.recurrent:
            cache.__dict__.update(_copied(state))
        cut(caches, self.length)


def _copied(state: Any) -> Any:
    """A copy of nested containers; its arrays are new names for the same values, safe from writes in place."""
    if isinstance(state, mx.array):
        return copy.copy(state)
    if isinstance(state, dict):
        return {key: _copied(value) for key, value in state.items()}
    if isinstance(state, (list, tuple)):
        return type(state)(_copied(value) for value in state)
    return state
