"""A bar on stderr while a long prompt is read. Knows terminals; knows nothing of models."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_SHOWN_FROM = 1024  # prompt tokens; fewer are read before a bar could be seen


@contextmanager
def prefill_bar() -> Iterator[Callable[[int, int], None]]:
    """Yield a callback (processed, total tokens) that draws a bar for a long prompt if stderr is a terminal."""
    from tqdm import tqdm

    bar = None

    def progress(processed: int, total: int) -> None:
        nonlocal bar
        if bar is None:
            is_hidden = total < _SHOWN_FROM or not sys.stderr.isatty()
            bar = tqdm(total=total, desc="Reading the prompt", unit="token", leave=False, disable=is_hidden)
        bar.update(processed - bar.n)
        if processed == total:
            bar.close()

    try:
        yield progress
    finally:
        if bar is not None:
            bar.close()
