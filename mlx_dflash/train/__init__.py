"""Train a DFlash draft for any target: text that the target writes, and a fit of a draft to it.

    prompt    what a target is asked, as token ids
    sample    a prompt and what follows it, as token ids: the target's answer, or text as it is
    corpus    a file of samples, which `train data` writes and `train fit` reads: training text
    lesson    a sample as the target sees it: its hidden states and likeliest next tokens, from which a draft learns

`python -m mlx_dflash.train data` and `fit` are the steps; each continues where it was interrupted.
Source: DFlash, block diffusion for flash speculative decoding (z-lab).
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .fitting import fit
    from .options import DataOptions, FitOptions
    from .step_data import write_data

_HOME = {"DataOptions": "options", "FitOptions": "options", "fit": "fitting", "write_data": "step_data"}
__all__ = ["DataOptions", "FitOptions", "fit", "write_data"]


def __getattr__(name: str):
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOME[name]}", __name__), name)


def __dir__():
    return [*globals(), *__all__]
