"""The way back of a target's caches to an earlier token, for each kind of cache.

Rows that were appended are trimmed. Any other state is kept before a pass, which costs a reference to each of its
arrays. To rewind, the caches take that state again, and the kept tokens run in front of the next pass; or only their
recurrences run again, see recurrences.py.
Knows the cache classes of mlx-lm and ours; knows nothing of models or rounds.
"""

import copy
from collections.abc import Iterator
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import (
    ArraysCache,
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
_READ_IN_ANY_STEPS = (GrowingKVCache, WindowedKVCache, QuantizedKVCache, ConcatenateKVCache, ArraysCache)


def adopt(caches: list[Any], slack: int) -> None:
    """Replace, in place, mlx-lm's caches by ours where mlx-lm's cannot trim up to `slack` rows.

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
    """Yield the caches; in place of a CacheList, those inside it."""
    for cache in caches:
        if isinstance(cache, CacheList):
            yield from leaves(cache.caches)
        else:
            yield cache


def lengths(caches: list[Any]) -> list[int]:
    """Return the number of tokens that each cache covers, for the caches that count them."""
    known = (getattr(c, "offset", None) for c in leaves(caches))
    return [n for n in known if isinstance(n, int)]


def set_stepwise(caches: list[Any], is_stepwise: bool) -> None:
    """Let windows mask the rows of a pass as one-row steps of mlx-lm do, or else as a chunk of its prefill does."""
    for cache in leaves(caches):
        if isinstance(cache, WindowedKVCache):
            cache.is_stepwise = is_stepwise


def can_be_read_in_any_steps(caches: list[Any]) -> bool:
    """Whether the caches hold the same, to rounding, wherever a prefill is cut into steps.

    In a window with rows that stay for ever, mlx-lm lets only the first rows of a step see those.
    """
    return all(type(c) in _READ_IN_ANY_STEPS and not getattr(c, "keep", 0) for c in leaves(caches))


def can_trim(caches: list[Any], rows: int) -> bool:
    """Whether every cache can lose this many of its last rows."""
    return rows == 0 or all(type(c) in _ROW_CACHES and (c.offset == 0 or rows <= _max_trim(c)) for c in leaves(caches))


def trim_to(caches: list[Any], length: int) -> None:
    """Trim the caches that keep rows to those of the first `length` tokens; other caches stay as they are."""
    for cache in leaves(caches):
        rows = cache.offset - length if type(cache) in _ROW_CACHES else 0
        if rows <= 0:
            continue
        assert rows <= _max_trim(cache), f"{type(cache).__name__} has {_max_trim(cache)} rows to give, not {rows}"
        if isinstance(cache, ConcatenateKVCache):
            # Its own trim forgets to cut the arrays.
            cache.keys, cache.values = cache.keys[..., :length, :], cache.values[..., :length, :]
            cache.offset = length
        else:
            cache.trim(rows)


def _max_trim(cache: Any) -> int:
    return cache.max_trim() if hasattr(cache, "max_trim") else cache.offset - getattr(cache, "start_position", 0)


class Checkpoint:
    """The caches as they are before a pass, when they cover `length` tokens.

    Rows are not kept here, because they can be trimmed. with_windows: also keep the rows of the windows, for passes
    that are longer than their slack.
    recurrent: the caches that cannot be trimmed, each with its state.
    """

    def __init__(self, caches: list[Any], length: int, with_windows: bool = False):
        self.length = length
        self._caches = list(caches)
        copied = (
            c for c in leaves(caches) if type(c) not in _ROW_CACHES or with_windows and isinstance(c, WindowedKVCache)
        )
        self.recurrent = [(cache, _copied(cache.__dict__)) for cache in copied]

    def put_into(self, caches: list[Any]) -> None:
        """Put the cache objects of that time into the list again, each with the contents that it has now."""
        caches[:] = self._caches

    def rewind(self, caches: list[Any]) -> None:
        """Put the cache objects of that time into the list again, each with the contents that it had."""
        self.put_into(caches)
        for cache, state in self.recurrent:
            cache.__dict__.update(_copied(state))
        trim_to(caches, self.length)


def _copied(state: Any) -> Any:
    """Return a copy of nested containers.

    Its arrays share their values with the originals, but writes in place to those do not reach them.
    """
    if isinstance(state, mx.array):
        return copy.copy(state)
    if isinstance(state, dict):
        return {key: _copied(value) for key, value in state.items()}
    if isinstance(state, (list, tuple)):
        return type(state)(_copied(value) for value in state)
    return state
