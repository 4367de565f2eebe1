"""Train a DFlash draft for any target: text that the target writes, a fit to it, and what the draft is worth.

Three steps, `python -m mlx_dflash.train data`, `fit` and `eval`; each continues where it was interrupted.
Source: DFlash, block diffusion for flash speculative decoding (z-lab).
"""

from .fitting import fit
from .options import FitOptions

__all__ = ["FitOptions", "fit"]
