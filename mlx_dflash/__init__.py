"""mlx_dflash: DFlash block-diffusion speculative decoding for MLX.

The text is the target's own, token for token; a small draft network makes it come several tokens at a time.
Nothing heavy is imported before it is used.
"""

import signal
import sys
from importlib import import_module
from typing import TYPE_CHECKING

from ._version import __version__ as __version__
from .blas import load_blas

if sys.argv[:1] == ["-m"]:
    # `python -m mlx_dflash.COMMAND` is still importing; Ctrl-C ends it silently, until the command catches it.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
load_blas()

if TYPE_CHECKING:
    from .api import generate, open_session, stream_generate
    from .caches.saved import load_prompt_cache, make_prompt_cache, save_prompt_cache
    from .checkpoints.drafts import load_draft
    from .checkpoints.targets import load
    from .grammars import Grammars
    from .pair import Pair
    from .session import Session
    from .text import GenerationResponse

_HOME = {
    "GenerationResponse": "text",
    "Grammars": "grammars",
    "Pair": "pair",
    "Session": "session",
    "generate": "api",
    "load": "checkpoints.targets",
    "load_draft": "checkpoints.drafts",
    "load_prompt_cache": "caches.saved",
    "make_prompt_cache": "caches.saved",
    "open_session": "api",
    "save_prompt_cache": "caches.saved",
    "stream_generate": "api",
}
__all__ = [
    "GenerationResponse",
    "Grammars",
    "Pair",
    "Session",
    "generate",
    "load",
    "load_draft",
    "load_prompt_cache",
    "make_prompt_cache",
    "open_session",
    "save_prompt_cache",
    "stream_generate",
]


def __getattr__(name: str):
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOME[name]}", __name__), name)


def __dir__():
    return [*globals(), *__all__]
