"""Train a DFlash draft for any target: text that the target writes, and a fit to it.

Two steps, `python -m mlx_dflash.train data` and `fit`; each continues where it was interrupted.
Source: DFlash, block diffusion for flash speculative decoding (z-lab).
"""

from .fitting import fit
from .options import FitOptions

__all__ = ["FitOptions", "fit"]
