"""A fast BLAS for MLX's CPU backend on Linux.

MLX's Linux wheel brings the reference BLAS, whose cost grows linearly with the rows of a matrix product, so a block
would cost as much as its tokens one by one. A BLAS with global symbols that is loaded first takes its place. BLIS comes
first: it multiplies few rows without repacking the weights, on which OpenBLAS spends most of a verify.
"""

import ctypes
import os
import sys

_BLIS = ("libblis.so.4", "libblis.so")
_OPENBLAS = ("libopenblas.so.0", "libopenblas.so")
_UNSET = -1  # what BLIS says of its threads where the environment says nothing
_MOST_THREADS = 8  # few rows wait for memory, which more threads do not make faster


def load_blas() -> bool:
    """Load the system's BLIS, or else its OpenBLAS, so that MLX, imported afterwards, uses it.

    Returns whether one was loaded. Does nothing where MLX brings its own BLAS (macOS), where neither is installed
    (Debian: libblis4-openmp, libopenblas0-pthread), or where MLX is already imported. BLIS gets a thread for each
    core, at most 8, unless BLIS_NUM_THREADS or OMP_NUM_THREADS says otherwise; OpenBLAS sees to that itself.
    """
    if sys.platform != "linux" or "mlx.core" in sys.modules:
        return False
    for name in _BLIS + _OPENBLAS:
        try:
            library = ctypes.CDLL(name, mode=ctypes.RTLD_GLOBAL)
        except OSError:
            continue
        if name in _BLIS:
            _use_all_cores(library)
        return True
    return False


def _use_all_cores(blis: ctypes.CDLL) -> None:
    # The builds with POSIX threads start new ones in every product, which costs more than they save in a small one.
    if blis.bli_info_get_enable_openmp() and blis.bli_thread_get_num_threads() == _UNSET:
        blis.bli_thread_set_num_threads(ctypes.c_int64(min(len(os.sched_getaffinity(0)), _MOST_THREADS)))
