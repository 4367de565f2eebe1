"""Which caches of a target can take rows back, and how.

Knows the cache classes of mlx-lm and ours; knows nothing of models or rounds.
"""

from typing import Any

from mlx_lm.models.cache import CacheList, ChunkedKVCache, KVCache, QuantizedKVCache, RotatingKVCache

from .cache import GrowingKVCache, WindowedKVCache


def adopt(caches: list[Any], slack: int) -> None:
    """Replace, in place, the caches of a target by ones that can take back up to `slack` rows.

    Raises ValueError that names the class of a cache that cannot.
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
        return cache
    if kind in (GrowingKVCache, QuantizedKVCache, ChunkedKVCache):
        return cache
    if kind is CacheList:
        cache.caches = tuple(_adopted(c, slack) for c in cache.caches)
        return cache
    raise ValueError(
        f"the target keeps a {kind.__name__}, which cannot take back refused tokens; supported are "
        "KVCache, QuantizedKVCache, ChunkedKVCache, RotatingKVCache (keep = 0) and a CacheList of these"
    )


def lengths(caches: list[Any]) -> list[int]:
    """Return the number of tokens that each cache covers."""
    return [lengths(c.caches)[0] if isinstance(c, CacheList) else c.offset for c in caches]


def can_drop_rows(caches: list[Any], rows: int) -> bool:
    """Whether every cache can take back this many of its last rows."""
    return all(
        can_drop_rows(c.caches, rows) if isinstance(c, CacheList) else rows <= (c.max_trim() if hasattr(c, "max_trim") else c.offset)
        for c in caches
    )


def drop_rows(caches: list[Any], rows: int) -> None:
    """Take back the last rows of every cache."""
    if rows == 0:
        return
    for cache in caches:
        if isinstance(cache, CacheList):
            drop_rows(cache.caches, rows)
            continue
        dropped = cache.trim(rows)
        assert dropped == rows, f"{type(cache).__name__} gave back {dropped} of {rows} rows"
