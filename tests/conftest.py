"""Loads a fast BLAS, through the package, before any test imports MLX; with one thread, since the tests run in several processes."""

import os

for blas in ("BLIS", "OPENBLAS"):
    os.environ.setdefault(f"{blas}_NUM_THREADS", "1")

import mlx_dflash  # noqa: E402, F401
