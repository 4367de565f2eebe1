"""Prompt caches of a target and its draft: one list, the target's entries first, then the draft's context caches.

The files are mlx-lm's: mlx-lm reads a saved cache of a target alone, and mlx-lm's own files are read here.
Knows of a draft only that it can make its caches.
"""

from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten
from mlx_lm.models import cache as mlx_lm_cache

from ..files.folders import replaced_file
from ..files.safetensors import check_safetensors
from . import rollback
from .growing import GrowingKVCache
from .lease import refuse_in_use
from .windowed import WindowedKVCache

# What mlx and mlx-lm raise for a file that is cut short, or holds something else.
_DAMAGES = (RuntimeError, ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError, MemoryError)
_STOCK: dict[type, Any] = {GrowingKVCache: mlx_lm_cache.KVCache, WindowedKVCache: mlx_lm_cache.RotatingKVCache}


@runtime_checkable
class Draft(Protocol):
    """A draft, as far as it is needed here. Other models have no context to project."""

    config: Any

    def make_cache(self) -> list[Any]:
        """Return its empty context caches."""

    def project_context(self, features: Any, caches: list[Any]) -> None:
        """Append the context KV of features to the caches."""


def make_prompt_cache(model: nn.Module, draft_model: Draft | None = None, max_kv_size: int | None = None) -> list[Any]:
    """Return empty caches for a target and, after them, for its draft.

    max_kv_size: as in mlx-lm, of the target's caches. Raises ValueError if it is not larger than the 4 rows that stay
    for ever, and TypeError for a draft_model that is no DFlash draft.
    """
    if max_kv_size is not None and max_kv_size <= 4:
        raise ValueError(f"max_kv_size must be more than the 4 first tokens, which stay for ever; got {max_kv_size}")
    caches = mlx_lm_cache.make_prompt_cache(model, max_kv_size)
    if draft_model is None:
        return caches
    if not isinstance(draft_model, Draft):
        raise TypeError(f"draft_model must be a DFlash draft from load_draft, got {type(draft_model).__name__}")
    return [*caches, *draft_model.make_cache()]


def draft_entries(prompt_cache: list[Any], model: nn.Module, draft: Draft) -> list[Any]:
    """Return the draft's entries. If the cache is empty and the target's alone, they are added to it, in place.

    Raises ValueError if the list does not have one entry for each layer, if the entries of the two cover different
    numbers of tokens, or if a generation that has not ended uses the cache.
    """
    refuse_in_use(prompt_cache)
    num_target, num_draft = len(mlx_lm_cache.make_prompt_cache(model)), draft.config.num_layers
    if len(prompt_cache) == num_target and all(c.empty() for c in prompt_cache):
        prompt_cache += draft.make_cache()
    if len(prompt_cache) != num_target + num_draft:
        raise ValueError(
            f"prompt_cache has {len(prompt_cache)} entries; expected {num_target} of the target and {num_draft} of the "
            "draft. A cache that was filled without the draft has no context for it: start with "
            "make_prompt_cache(model, draft_model)"
        )
    targets, contexts = prompt_cache[:num_target], prompt_cache[num_target:]
    rollback.adopt(contexts, slack=2 * draft.config.block_size)
    prompt_cache[num_target:] = contexts
    # A cache that its model never uses stays empty.
    covered = {c.offset for c in contexts} | {n for n in rollback.lengths(targets) if n > 0}
    if all(c.empty() for c in targets):
        covered.add(0)
    if len(covered) > 1:
        raise ValueError(
            f"the caches cover {sorted(covered)} tokens; expected the same number in the target's and the draft's"
        )
    return contexts


def covers(prompt_cache: list[Any], length: int) -> bool:
    """Whether all entries that count their tokens cover either none or exactly `length` of them."""
    counts = {getattr(c, "offset", None) for c in rollback.leaves(prompt_cache)}
    return all(count in (0, length) for count in counts if isinstance(count, int))


def try_trim(prompt_cache: list[Any], rows: int) -> bool:
    """Trim the last rows of every entry; return False, with nothing done, if one of the entries cannot lose them."""
    refuse_in_use(prompt_cache)
    has_ours = any(hasattr(c, "max_trim") for c in rollback.leaves(prompt_cache))
    if not (mlx_lm_cache.can_trim_prompt_cache(prompt_cache) or (has_ours and rollback.can_trim(prompt_cache, rows))):
        return False
    for cache in prompt_cache:
        cache.trim(rows)
    return True


def save_prompt_cache(file_name: str, cache: list[Any], metadata: dict[str, str] | None = None) -> None:
    """Save a prompt cache, with or without draft entries, to a .safetensors file.

    The file is written whole or not at all; an older one of that name stays until then. metadata: text by name.
    Raises OSError if it cannot be written, ValueError if a generation that has not ended uses the cache, and for a kind
    of cache that mlx-lm cannot load.
    """
    refuse_in_use(cache)
    stock = [_stock(c) for c in cache]
    for entry in stock:
        if not _can_be_loaded(type(entry).__name__):
            raise ValueError(f"a {type(entry).__name__} cannot be saved: mlx-lm would not load it again")
    path = Path(file_name)
    if path.suffix != ".safetensors":
        path = path.with_name(path.name + ".safetensors")  # as MLX names it
    with replaced_file(path) as part:
        try:
            mlx_lm_cache.save_prompt_cache(str(part), stock, metadata)
        except RuntimeError as error:
            raise OSError(f"{path} cannot be written, is the disk full? {error}") from error


def load_prompt_cache(file_name: str, return_metadata: bool = False) -> Any:
    """Load a prompt cache that was saved by save_prompt_cache or by mlx-lm.

    Returns the list of caches or, with return_metadata, (caches, metadata). Raises FileNotFoundError, or ValueError
    that names the file if it holds anything else.
    """
    path = Path(file_name)
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    check_safetensors(path)
    try:
        _check_kinds(path)
        caches, metadata = mlx_lm_cache.load_prompt_cache(str(path), return_metadata=True)
        mx.eval([cache.state for cache in caches if not cache.empty()])
    except (*_DAMAGES, RecursionError) as error:
        told = " ".join(str(error).split())[:200] or type(error).__name__
        raise ValueError(f"{path} is no saved prompt cache: {told}") from error
    return (caches, metadata) if return_metadata else caches


def _check_kinds(path: Path) -> None:
    """Raise ValueError if the file names other things than mlx-lm's caches: mlx-lm calls what it names."""
    loaded: Any = mx.load(str(path), return_metadata=True)
    metadata, kinds, _ = tree_unflatten(list(loaded[1].items()))
    for kind in kinds:
        if not _can_be_loaded(kind):
            raise ValueError(f"it names {kind!r}, which is no cache of mlx-lm")
    if metadata and not all(isinstance(text, str) for text in metadata.values()):
        raise ValueError("its metadata must be text by name")


def _can_be_loaded(kind: str) -> bool:
    found = getattr(mlx_lm_cache, kind, None)
    return isinstance(found, type) and issubclass(found, mlx_lm_cache._BaseCache)


def _stock(cache: Any) -> Any:
    """Return a cache of mlx-lm's own class with the same contents."""
    if isinstance(cache, mlx_lm_cache.CacheList):
        return mlx_lm_cache.CacheList(*map(_stock, cache.caches))
    return _STOCK[type(cache)].from_state(cache.state) if type(cache) in _STOCK else cache
