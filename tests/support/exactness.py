"""How exact a kernel must be: at most twice the error of plain float32 arithmetic, and one rounding of the result.

Plain arithmetic adds one term after another, in the order in which they stand. Stock MLX is no measure on a CPU: its
BLAS chooses the order of its sums by the machine, and a BLAS that keeps 16 sums side by side is about four times as
exact as one that keeps a single sum, as the kernels do. In half precision, stock MLX rounds what the kernels do not.
"""

import mlx.core as mx
import numpy as np

# One rounding of a result of size 1. In float32 eight: the fast exp2 of a GPU is not rounded correctly.
ROUNDING = {mx.float32: 2**-21, mx.float16: 2**-11, mx.bfloat16: 2**-8}


def wide(x: mx.array, dtype: type = np.float64) -> np.ndarray:
    """Return an array of any MLX float type as numpy's float64, or another dtype of numpy."""
    return np.array(x.astype(mx.float32)).astype(dtype)


def error(x: mx.array, expected: np.ndarray) -> float:
    """Return the largest distance of a result from its float64 reference, which has the same number of elements."""
    return float(np.abs(wide(x).reshape(expected.shape) - expected).max())


def rounding(expected: np.ndarray, dtype: mx.Dtype) -> float:
    """Return what rounding to dtype may change in a result."""
    return ROUNDING[dtype] * float(np.abs(expected).max())


def allowed_error(plain: np.ndarray, expected: np.ndarray, dtype: mx.Dtype) -> float:
    """Return the largest error that a kernel may make.

    plain: the float32 result of plain arithmetic. expected: the float64 reference. dtype: type of the kernel's result.

    A kernel makes as many roundings in each sum as plain arithmetic does, but in another order. The errors are then of
    one size, and the largest of many differs by less than a factor of two from one order to the other.
    """
    return 2 * error(mx.array(plain).astype(dtype), expected) + rounding(expected, dtype)
