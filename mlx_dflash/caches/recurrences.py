"""Recurrent layers that run again over the kept tokens of a pass, instead of the whole model.

Where the layers of a target are a short convolution and a recurrence that mlx-lm has as a function, only these run
again, from recorded inputs.
Knows what mlx-lm's recurrent layers call and what their caches keep; knows nothing of rounds.
"""

import inspect
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import ArraysCache

# The recurrences of mlx-lm that can run again, and their arguments with one entry a token, on axis 1. Both return
# the outputs and the state after the last token.
_RECURRENCES = {
    "gated_delta_update": ("q", "k", "v", "a", "b", "mask"),
    "ssm_update": ("hidden_states", "B", "C", "dt", "mask"),
}


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
