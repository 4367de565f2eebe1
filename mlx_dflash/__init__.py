"""mlx_dflash: DFlash block-diffusion speculative decoding for MLX.

The text is the target's own, token for token; a small draft network makes it come several tokens at a time.
Nothing heavy is imported before it is used.
"""

from importlib import import_module

from .blas import load_blas

load_blas()

_HOME = {
    "load": "loading",
    "load_draft": "loading",
    "generate": "api",
    "stream_generate": "api",
    "GenerationResponse": "api",
    "make_prompt_cache": "prompt_cache",
    "save_prompt_cache": "prompt_cache",
    "load_prompt_cache": "prompt_cache",
}
__all__ = sorted(_HOME)
__version__ = "0.1.0"


def __getattr__(name: str):
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOME[name]}", __name__), name)


def __dir__():
    return [*globals(), *__all__]
