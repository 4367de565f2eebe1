"""Loads OpenBLAS, through the package, before any test imports MLX; with one thread, since the tests run in several processes."""

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import mlx_dflash  # noqa: E402, F401
