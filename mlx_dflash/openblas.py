"""A fast BLAS for MLX's CPU backend on Linux.

MLX's Linux wheel links the reference BLAS, whose cost grows linearly with the rows of a matrix product, so a
block would cost as much as its tokens one by one. A BLAS with global symbols that is loaded first takes its place.
"""

import ctypes
import sys


def load_openblas() -> bool:
    """Load the system's OpenBLAS, so that MLX, imported afterwards, uses it.

    Returns whether it was loaded. Does nothing where MLX brings its own BLAS (macOS), where OpenBLAS is
    not installed (Debian: libopenblas0-pthread), or where MLX is already imported.
    """
    if sys.platform != "linux" or "mlx.core" in sys.modules:
        return False
    for name in ("libopenblas.so.0", "libopenblas.so"):
        try:
            ctypes.CDLL(name, mode=ctypes.RTLD_GLOBAL)
            return True
        except OSError:
            continue
    return False
