"""Recurrent layers that run again over the kept tokens of a pass, instead of the whole model.

Where the layers of a target are a short convolution and a recurrence that mlx-lm has as a function, only these run
again, from recorded inputs.
Knows what mlx-lm's recurrent layers call and what their caches keep; knows nothing of rounds, and not how the
recorders get into their places.
"""

import inspect
import sys
from collections.abc import Callable
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
    """One call of a recurrence, or of a short convolution, which has no function and the input as its argument.

    state: what the recurrence returned as its state after the last token.
    """

    function: Callable | None
    arguments: dict[str, Any]
    state: Any = None

    def state_after(self, tokens: int) -> mx.array:
        """Return the state after the first `tokens` tokens of the pass."""
        if self.function is None:
            rows = self.arguments["kernel_size"] - 1
            return mx.contiguous(self.arguments["input"][:, tokens : tokens + rows])
        timed = _RECURRENCES[self.function.__name__]
        arguments = {k: v[:, :tokens] if k in timed and v is not None else v for k, v in self.arguments.items()}
        bound = inspect.signature(self.function).bind_partial()
        bound.arguments.update(arguments)
        return self.function(*bound.args, **bound.kwargs)[1]

    def produced(self, value: mx.array | None) -> bool:
        """Whether this call left a cache's entry as it is."""
        if value is None or self.function is not None:
            return value is not None and self.state is value
        rows = self.arguments["kernel_size"] - 1
        left = self.arguments["input"][:, -rows:]
        return left.shape == value.shape and left.dtype == value.dtype and mx.array_equal(left, value).item()


class Recurrences:
    """The short convolutions and recurrences of a model: their calls in one pass, to be run again over fewer tokens.

    At the first rewind, each entry of each cache is compared with the recorded calls, to find the call that produced
    it. If an entry was produced by something else, `works` is False from then on, and the caller has to run the
    model again.
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

    def recorders(self, is_needed: bool) -> list[tuple[dict, str, Callable]]:
        """Forget the calls of the pass before; return what records those of the next, if it is needed.

        Each is a container and a key, where the model keeps a convolution or a recurrence, and a function to be called
        there instead: with the original first, then the arguments of the call.
        """
        self._calls = []
        places = [*self._convolutions, *self._functions] if self.works and is_needed else []
        return [(home, name, self._record) for home, name in places]

    def _record(self, original: Any, *args, **kwargs) -> Any:
        out = original(*args, **kwargs)
        if isinstance(original, nn.Conv1d):
            call = _Call(None, {"input": args[0], "kernel_size": original.weight.shape[1]})
        else:
            call = _Call(original, dict(inspect.signature(original).bind(*args, **kwargs).arguments), out[1])
        self._calls.append(call)
        return out

    def rewind(self, recurrent: list[tuple[Any, dict[str, Any]]], tokens: int) -> bool:
        """Let caches hold the state that they had after the first tokens (>= 1) of the pass; return whether they do.

        recurrent: the caches, each with its state before the pass.
        """
        if not self.works:
            return False
        if self._plan is None:
            self._plan = self._find_calls([cache for cache, _ in recurrent])
            self.works = self._plan is not None
        for cache, entry, call in self._plan or ():
            recurrent[cache][0][entry] = self._calls[call].state_after(tokens)
        return self.works

    def _find_calls(self, caches: list[Any]) -> list[tuple[int, int, int]] | None:
        """Map each cache entry to the recorded call that produced it; return None if any entry has no such call."""
        plan, free = [], list(range(len(self._calls)))
        for i, cache in enumerate(caches):
            if type(cache) is not ArraysCache or cache.lengths is not None or cache.left_padding is not None:
                return None
            for entry, value in enumerate(cache.cache):
                found = next((c for c in free if self._calls[c].produced(value)), None)
                if found is None:
                    return None
                free.remove(found)
                plan.append((i, entry, found))
        return plan
