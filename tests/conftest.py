"""Loads OpenBLAS, through the package, before any test imports MLX."""

import mlx_dflash  # noqa: F401
