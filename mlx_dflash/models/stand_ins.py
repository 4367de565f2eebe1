"""Stand-ins: what takes the place of a module or a function inside a scope, for the thread that opened the scope.

This is the one way in which a model of mlx-lm, or MLX itself, is changed, and every change ends with its scope.
Knows containers and threads; knows nothing of what the stand-ins do.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

# One scope at a time: models and MLX are shared by all sequences.
_scope = threading.RLock()


class Replacement(NamedTuple):
    """An entry of a list or a dict, a module being a dict, and what is called in its place.

    instead: gets the original entry first, then the arguments of the call.
    """

    container: Any
    key: Any
    instead: Callable[..., Any]


class StandIn:
    """Stands where an entry is kept, and is like it, but for calls in the thread that opened the scope."""

    def __init__(self, original: Any, instead: Callable[..., Any]):
        self._original, self._instead, self._thread = original, instead, threading.get_ident()

    def __call__(self, *args, **kwargs):
        if threading.get_ident() != self._thread:
            return self._original(*args, **kwargs)
        return self._instead(self._original, *args, **kwargs)

    def __getattr__(self, name: str):
        return getattr(self._original, name)

    # Models tell their layers apart by isinstance, which asks for __class__; type() still tells a stand-in.
    @property
    def __class__(self):
        return type(self._original)


@contextmanager
def standing_in(replacements: Sequence[Replacement]) -> Iterator[None]:
    """Let this thread's calls of the entries, inside the scope, be calls of what is given instead.

    Of two replacements of one entry, the later one counts. Scopes of other threads wait until this one has ended.
    """
    with _scope:
        originals = [container[key] for container, key, _ in replacements]
        try:
            for (container, key, instead), original in zip(replacements, originals):
                container[key] = StandIn(original, instead)
            yield
        finally:
            for (container, key, _), original in zip(replacements, originals):
                container[key] = original
