"""How the caches of a target go back to an earlier token, per kind of cache.

Rows that were appended are cut off. Any other state goes back to what it was before the pass: arrays are values, so
keeping it costs a reference. From there the kept tokens are put in front of the next pass, or, where the layers are
a short convolution and a recurrence that mlx-lm has as a function, only these run again over the kept rows.
Knows the cache classes of mlx-lm and ours, and what mlx-lm's recurrent layers call; knows nothing of rounds.
"""

import copy
import inspect
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    ChunkedKVCache,
    ConcatenateKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
)

from .growing import GrowingKVCache, WindowedKVCache

_ROW_CACHES = (GrowingKVCache, WindowedKVCache, QuantizedKVCache, ChunkedKVCache, ConcatenateKVCache)
# The recurrences of mlx-lm that can run again, and their arguments with one entry a token, on axis 1. Both return
# the outputs and the state after the last token.
_RECURRENCES = {
    "gated_delta_update": ("q", "k", "v", "a", "b", "mask"),
    "ssm_update": ("hidden_states", "B", "C", "dt", "mask"),
}


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


@dataclass
class _Call:
    """One call of a short convolution (function None, the input as its argument) or of a recurrence."""

    function: Callable | None
    arguments: dict[str, Any]
    state: Any = None  # after the last token

    def state_after(self, tokens: int, start: Any = None) -> mx.array:
        """The state after the first tokens of the pass."""
        if self.function is None:
            rows = self.arguments["kernel_size"] - 1
            return mx.contiguous(self.arguments["input"][:, tokens : tokens + rows])
        timed = _RECURRENCES[self.function.__name__]
        arguments = {k: v[:, :tokens] if k in timed and v is not None else v for k, v in self.arguments.items()}
        bound = inspect.signature(self.function).bind_partial()
        bound.arguments.update(arguments)
        return self.function(*bound.args, **bound.kwargs)[1]


class _Recorder:
    """Stands for a convolution or a recurrence and records its calls, in the thread that opened the scope."""

    def __init__(self, original: Any, record: Callable):
        self._original, self._record, self._thread = original, record, threading.get_ident()

    def __call__(self, *args, **kwargs):
        out = self._original(*args, **kwargs)
        if threading.get_ident() == self._thread:
            self._record(self._original, args, kwargs, out)
        return out

    def __getattr__(self, name: str):
        return getattr(self._original, name)


class Recurrences:
    """The short convolutions and recurrences of a model, recorded in a scope and run again over fewer tokens.

    Which recorded call left which entry of which cache is found by comparing, at the first use. `works` is False
    once some state was left by something else; the caller then has to run the model again.
    """

    def __init__(self, model: nn.Module):
        modules = [m for _, m in model.named_modules()]
        self._convolutions = [
            (parent, name) for parent in modules for name, child in parent.items() if isinstance(child, nn.Conv1d)
        ]
        homes = {type(m).__module__ for m in modules}
        self._functions = [
            (vars(sys.modules[home]), name)
            for home in sorted(homes)
            for name in _RECURRENCES
            if name in vars(sys.modules[home])
        ]
        self.works = bool(self._convolutions or self._functions)
        self._plan: list[tuple[int, int, int]] | None = None  # cache, entry, call
        self._calls: list[_Call] = []

    @contextmanager
    def recorded(self, is_needed: bool) -> Iterator[None]:
        """Record the calls of the pass made inside the scope, if needed; those of the pass before are forgotten."""
        self._calls = []
        places = [*self._convolutions, *self._functions] if self.works and is_needed else []
        originals = [dict.__getitem__(home, name) for home, name in places]
        try:
            for (home, name), original in zip(places, originals):
                dict.__setitem__(home, name, _Recorder(original, self._record))
            yield
        finally:
            for (home, name), original in zip(places, originals):
                dict.__setitem__(home, name, original)

    def _record(self, original: Any, args: tuple, kwargs: dict, out: Any) -> None:
        if isinstance(original, nn.Conv1d):
            call = _Call(None, {"input": args[0], "kernel_size": original.weight.shape[1]})
        else:
            call = _Call(original, dict(inspect.signature(original).bind(*args, **kwargs).arguments), out[1])
        self._calls.append(call)

    def rewind(self, recurrent: list[tuple[Any, dict[str, Any]]], tokens: int) -> bool:
        """Let recurrent caches hold the state after the first tokens (>= 1) of the pass; return whether they do."""
        if not self.works:
            return False
        if self._plan is None:
            self._plan = self._explained([cache for cache, _ in recurrent])
            self.works = self._plan is not None
        for cache, entry, call in self._plan or ():
            recurrent[cache][0][entry] = self._calls[call].state_after(tokens)
        return self.works

    def _explained(self, caches: list[Any]) -> list[tuple[int, int, int]] | None:
        """For every entry of every cache the call that left it; None if one is left by something else."""
        plan, free = [], list(range(len(self._calls)))
        for i, cache in enumerate(caches):
            if type(cache) is not ArraysCache or cache.lengths is not None or cache.left_padding is not None:
                return None
            for entry, value in enumerate(cache.cache):
                found = next((c for c in free if self._leaves(self._calls[c], value)), None)
                if found is None:
                    return None
                free.remove(found)
                plan.append((i, entry, found))
        return plan

    @staticmethod
    def _leaves(call: _Call, value: mx.array | None) -> bool:
        if value is None or call.function is not None:
            return value is not None and call.state is value
        rows = call.arguments["kernel_size"] - 1
        left = call.arguments["input"][:, -rows:]
        return left.shape == value.shape and left.dtype == value.dtype and mx.array_equal(left, value).item()
