"""The claim of a running generation on the caches that it continues.

Between two tokens of a run, the caches cover another number of tokens than the text does. Whoever reads them then
would go on from the wrong place, so a cache in use is refused by name.
Knows caches and threads; knows nothing of what the run computes.
"""

import threading
from collections.abc import Callable
from typing import Any

from .rollback import leaves


class Lease:
    """A claim on caches, from the first token of a run until its end.

    Raises ValueError if another run holds one of them.
    """

    def __init__(self, caches: list[Any]):
        refuse_in_use(caches)
        self._caches = list(leaves(caches))
        self._thread = threading.current_thread()
        self._finish: Callable[[], None] | None = None
        for cache in self._caches:
            cache.lease = self

    @property
    def is_here(self) -> bool:
        """Whether this is the thread that the run belongs to; MLX computes what is pending in no other."""
        return threading.current_thread() is self._thread

    def end(self, finish: Callable[[], None]) -> None:
        """Bring the caches to the text with finish() and release them; in a foreign thread, leave that for later."""
        if not self.is_here:
            self._finish = finish
            return
        try:
            finish()
        finally:
            for cache in self._caches:
                vars(cache).pop("lease", None)

    def end_left_over(self) -> bool:
        """Finish a run that ended in a foreign thread, if this is its own; return whether the caches are free now."""
        if self._finish is None or not self.is_here:
            return False
        self.end(self._finish)
        return True


def refuse_in_use(caches: list[Any]) -> None:
    """Raise ValueError if a run holds one of the caches."""
    for cache in leaves(caches):
        lease = getattr(cache, "lease", None)
        if lease is None or lease.end_left_over():
            continue
        raise ValueError(
            "the prompt cache is in use by a generation that has not ended: take all its responses or close() it "
            "first, in the thread that began it"
        )
