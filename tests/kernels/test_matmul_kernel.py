"""The quantized matrix product against float64, run by the emulator."""

from dataclasses import replace
from functools import cache

import mlx.core as mx
import numpy as np
import pytest
from support.exactness import allowed_error, error, rounding, wide
from support.metal_emulator import Emulator, emulate, why_unavailable

from mlx_dflash.kernels.call import MetalRunner
from mlx_dflash.kernels.choice import has_gpu
from mlx_dflash.kernels.matmul import FEATURE_TILES, Quantized, multiply_call, multiply_metal, multiply_ops, supports

needs_emulator = pytest.mark.skipif(why_unavailable() is not None, reason=str(why_unavailable()))
CASES = [  # dtype, bits, group size, rows, K, N
    (mx.float32, 4, 64, 5, 64, 32),
    (mx.float16, 4, 64, 8, 640, 40),
    (mx.bfloat16, 4, 64, 16, 1088, 96),
    (mx.bfloat16, 4, 128, 11, 256, 33),
    (mx.float32, 8, 64, 6, 192, 8),
    (mx.bfloat16, 8, 64, 16, 1024, 64),
    (mx.float16, 8, 128, 9, 128, 72),
]


def problem(case):
    dtype, bits, group_size, rows, inputs, outputs = case
    mx.random.seed(rows)
    weight = mx.random.normal((outputs, inputs)).astype(dtype)
    packed, scales, biases = mx.quantize(weight, group_size=group_size, bits=bits)
    return mx.random.normal((1, rows, inputs)).astype(dtype), Quantized(packed, scales, biases, group_size, bits)


def product(x, w, dtype=np.float64):
    """x times the transposed weights, (1, rows, N) in numpy's dtype: for each group of inputs, one term after another.

    A weight is scale * integer + bias, so a group adds scale * (sum of integer * x) + bias * (sum of x).
    """
    words = np.array(w.weight)
    shifts = w.bits * np.arange(32 // w.bits, dtype=np.uint32)
    integers = ((words[..., None] >> shifts) & (2**w.bits - 1)).reshape(len(words), -1).astype(dtype)
    x, scales, biases = (wide(a, dtype) for a in (x, w.scales, w.biases))
    out = np.zeros((*x.shape[:2], len(words)), dtype)
    for group in range(scales.shape[1]):
        products, total = np.zeros_like(out), np.zeros((*x.shape[:2], 1), dtype)
        for i in range(group * w.group_size, (group + 1) * w.group_size):
            products += x[..., i, None] * integers[:, i]
            total += x[..., i, None]
        out += scales[:, group] * products + biases[:, group] * total
    return out


@cache
def reference(case):
    """The float64 product of a case, and how far from it the kernel may be."""
    x, w = problem(case)
    expected = product(x, w)
    return expected, allowed_error(product(x, w, np.float32), expected, case[0])


@needs_emulator
@pytest.mark.parametrize("order", (0, 1, 7))
@pytest.mark.parametrize("case", CASES, ids=str)
def test_product_is_as_exact_as_plain_float32(case, order):
    expected, allowed = reference(case)
    y = multiply_metal(*problem(case), run=Emulator(order))
    assert y.shape == expected.shape and y.dtype == case[0]
    assert error(y, expected) <= allowed, (error(y, expected), allowed)


@pytest.mark.skipif(not has_gpu(), reason="no GPU that takes Metal kernels")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_product_on_this_gpu_is_as_exact_as_stock(case):
    x, w = problem(case)
    expected = product(x, w)
    ours = error(multiply_metal(x, w, run=MetalRunner()), expected)
    allowed = 2 * error(multiply_ops(x, w), expected) + rounding(expected, case[0])
    assert ours <= allowed, (ours, allowed)


@needs_emulator
@pytest.mark.parametrize("case", CASES, ids=str)
def test_each_weight_is_read_once_for_all_rows(case):
    x, w = problem(case)
    _, report = emulate(multiply_call(x, w))
    groups = -(-w.weight.shape[0] // (8 * FEATURE_TILES))
    assert report.buffers["w"]["group_read"] == w.weight.nbytes
    assert report.buffers["x"]["group_read"] == groups * x.nbytes
    assert report.counters["threadgroup_bytes"] <= 32768


@needs_emulator
def test_rows_of_a_longer_array_are_read_in_place():
    x, w = problem(CASES[1])
    longer = mx.concatenate([mx.full((1, 2, x.shape[2]), float("nan"), x.dtype), x], axis=1)
    y = multiply_metal(longer[:, 2:], w, run=Emulator())
    assert mx.array_equal(y, multiply_metal(x, w, run=Emulator()))


def test_shapes_the_kernel_does_not_know_are_refused():
    x, w = problem(CASES[2])
    assert supports(x, w)
    assert not supports(x[:, :4], w)  # stock reads a word per row: as good up to 4 rows
    assert not supports(mx.concatenate([x, x], axis=1), w)
    assert not supports(x.astype(mx.float32), w)
    assert not supports(x, replace(w, group_size=32))
    assert not supports(x, replace(w, bits=6))
