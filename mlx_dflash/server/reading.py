"""Reads a prompt into the caches in steps of about a second, so that a client that leaves stops it soon.

Knows sessions, and mlx-lm's caches where there is no draft; knows nothing of requests.
"""

import time
from collections.abc import Callable
from typing import Any

import mlx.core as mx
from mlx_lm.generate import generation_stream
from mlx_lm.models.cache import ArraysCache, KVCache, RotatingKVCache

from ..api import open_session
from ..caches.rollback import leaves
from ..pace import ReadingPace
from ..pair import Pair

_FIRST_STEP = 256  # tokens, while the speed of a target without a draft is unknown
_READ_IN_ANY_STEPS = (KVCache, RotatingKVCache, ArraysCache)


class Reader:
    """Reads prompts of one target, with its draft or without one. step_size: most tokens of a step."""

    def __init__(self, model: Any, draft: Any, step_size: int):
        self._model, self._draft, self._step_size = model, draft, step_size
        self._pace = ReadingPace(_FIRST_STEP)

    def read(self, tokens: list[int], caches: list[Any], progress: Callable[[int], None]) -> None:
        """Add tokens to what the caches cover. progress is called with the number of tokens that are read.

        What progress raises ends the reading; the caches then cover what was read.
        """
        ids = mx.array(tokens, mx.uint32)
        if self._draft is None:
            with mx.stream(generation_stream):
                self._read_alone(ids, caches, progress)
        else:
            session = open_session(Pair(self._model, self._draft), ids, prompt_cache=caches)
            session.read(ids, self._step_size, progress)

    def _read_alone(self, ids: mx.array, caches: list[Any], progress: Callable[[int], None]) -> None:
        """Read as mlx-lm does, in steps that are cut further where no result depends on it."""
        may_cut = all(type(c) in _READ_IN_ANY_STEPS and not getattr(c, "keep", 0) for c in leaves(caches))
        done = 0
        while done < ids.size:
            began, most = time.perf_counter(), self._step_size - done % self._step_size
            step = ids[done : done + (self._pace.step(most) if may_cut else most)]
            self._model(step[None], cache=caches)
            mx.eval([cache.state for cache in caches])
            self._pace.learn(step.size, time.perf_counter() - began)
            done += step.size
            mx.clear_cache()
            progress(done)
