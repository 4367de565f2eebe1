"""A fast BLAS for MLX's CPU backend on Linux.

MLX's Linux wheel brings the reference BLAS, whose cost grows linearly with the rows of a matrix product, so a block
would cost as much as its tokens one by one. A BLAS with global symbols that is loaded first takes its place. BLIS is
tried first: it multiplies few rows without repacking the weights, on which OpenBLAS spends most of a verify.
Knows libraries of the system; must be used before MLX is imported, and knows nothing of it.
"""

import ctypes
import os
import sys
from pathlib import Path

_BLIS = ("libblis.so.4", "libblis.so")
_OPENBLAS = ("libopenblas.so.0", "libopenblas.so")
_MKL = "libmkl_rt.so.2"  # of `pip install mkl`, which puts it where the loader does not look
_UNSET = -1  # the number of threads that BLIS reports if the environment does not say one
_MOST_THREADS = 8  # products of few rows wait for memory, which more threads do not make faster


def load_blas() -> bool:
    """Load the system's BLIS, its OpenBLAS or the environment's MKL, so that MLX, imported afterwards, uses it.

    Returns whether one was loaded. Does nothing where MLX brings its own BLAS (macOS), where none is installed
    (Debian: libblis4-openmp, libopenblas0-pthread; pip: mkl), or where MLX is already imported. BLIS gets a thread for
    each core, at most 8, unless BLIS_NUM_THREADS or OMP_NUM_THREADS says otherwise; the others see to that themselves.
    """
    if sys.platform != "linux" or "mlx.core" in sys.modules:
        return False
    for name in (*_BLIS, *_OPENBLAS, str(Path(sys.prefix, "lib", _MKL))):
        try:
            library = ctypes.CDLL(name, mode=ctypes.RTLD_GLOBAL)
        except OSError:
            continue
        if name in _BLIS:
            _use_all_cores(library)
        return True
    return False


def blas_in_use() -> str | None:
    """Return the file name of the library that multiplies matrices in this process in place of MLX's own BLAS.

    None if no library has taken its place, and on systems other than Linux.
    """
    if sys.platform != "linux":
        return None
    try:
        product = ctypes.CDLL(None).cblas_sgemm
    except AttributeError:
        return None
    address = ctypes.cast(product, ctypes.c_void_p).value or 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, *_, file = line.split()
        first, end = (int(number, 16) for number in span.split("-"))
        if first <= address < end:
            return Path(file).name
    return None


def advice() -> str | None:
    """Say in one line what to install if matrices are multiplied in MLX's own slow BLAS, else return None."""
    if sys.platform != "linux" or blas_in_use() is not None:
        return None
    return (
        "note: no fast BLAS is in use, so the CPU is several times slower than it could be: "
        "apt-get install libblis4-openmp; or, without root, pip install mkl"
    )


def _use_all_cores(blis: ctypes.CDLL) -> None:
    # The builds with POSIX threads start new ones in every product, which costs more than they save in a small one.
    if blis.bli_info_get_enable_openmp() and blis.bli_thread_get_num_threads() == _UNSET:
        blis.bli_thread_set_num_threads(ctypes.c_int64(min(len(os.sched_getaffinity(0)), _MOST_THREADS)))
