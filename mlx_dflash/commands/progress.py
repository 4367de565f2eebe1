"""A bar on stderr for what takes long. Knows terminals; knows nothing of what is counted."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

PROGRESS_FROM = 1024  # prompt tokens


@contextmanager
def prefill_bar() -> Iterator[Callable[[int, int], None]]:
    """A progress callback that draws a bar on stderr for long prompts, if somebody watches."""
    from tqdm import tqdm

    bar = None

    def progress(processed: int, total: int) -> None:
        nonlocal bar
        if bar is None:
            bar = tqdm(
                total=total,
                desc="Reading the prompt",
                unit="token",
                leave=False,
                disable=total < PROGRESS_FROM or not sys.stderr.isatty(),
            )
        bar.update(processed - bar.n)
        if processed == total:
            bar.close()

    try:
        yield progress
    finally:
        if bar is not None:
            bar.close()
