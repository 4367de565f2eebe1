"""Quantized matrix product for a few rows: Metal kernel and twin.

A verify pass has 2 to 16 rows: too many for MLX's matrix-vector kernels, and half a tile of its matrix-matrix kernel.
Knows affine-quantized weights as MLX packs them; knows nothing of models or of the choice between kernel and twin.
"""

from dataclasses import dataclass

import mlx.core as mx

from .call import KernelCall, Runner, metal_source

MAX_ROWS = 16
FEATURE_TILES = 4  # of 8 output features, per threadgroup
SIMDGROUPS = 8
ROW_STEPS = (5, 7, 9, 13)


@dataclass(frozen=True)
class Quantized:
    """Weights of a linear layer, without the bias of the layer.

    weight: (N, K * bits / 32) uint32. scales, biases: (N, K / group_size), of the quantization.
    """

    weight: mx.array
    scales: mx.array
    biases: mx.array
    group_size: int
    bits: int


def supports(x: mx.array, w: Quantized) -> bool:
    """Return whether the kernel knows this shape: 5 (8 bits: 6) to 16 rows, groups of 64 or 128."""
    rows = x.size // x.shape[-1]
    few = (5 if w.bits == 4 else 6) <= rows <= MAX_ROWS
    alike = x.dtype == w.scales.dtype and x.dtype in (mx.float32, mx.float16, mx.bfloat16)
    return few and alike and w.bits in (4, 8) and w.group_size in (64, 128) and w.weight.ndim == 2


def row_step(rows: int) -> int:
    """Round a number of rows, 5 to 16, down to the one whose verdict holds for it: a kernel gains least there."""
    return max(step for step in ROW_STEPS if step <= rows)


def multiply_metal(x: mx.array, w: Quantized, *, run: Runner) -> mx.array:
    """Compute multiply_ops by the kernel, with the same shapes. run: executes the launch."""
    return run(multiply_call(x, w))[0].reshape(*x.shape[:-1], w.weight.shape[0])


def multiply_call(x: mx.array, w: Quantized) -> KernelCall:
    """Return the launch for x (..., K) with at most 16 rows in all."""
    x = x.reshape(-1, x.shape[-1])
    rows, features = x.shape[0], w.weight.shape[0]
    row_tiles, groups = -(-rows // 8), -(-features // (8 * FEATURE_TILES))
    return KernelCall(
        "dflash_matmul",
        metal_source("matmul.metal"),
        inputs={"x": x, "w": w.weight, "scales": w.scales, "biases": w.biases},
        outputs={"y": ((rows, features), x.dtype)},
        template={
            "T": x.dtype,
            "BITS": w.bits,
            "GROUP": w.group_size,
            "MT": row_tiles,
            "NT": FEATURE_TILES,
            "SG": SIMDGROUPS,
        },
        grid=(groups * SIMDGROUPS * 32, 1, 1),
        threadgroup=(SIMDGROUPS * 32, 1, 1),
    )


def multiply_ops(x: mx.array, w: Quantized) -> mx.array:
    """Multiply x (..., K) by the transposed weights in stock MLX. Returns (..., N)."""
    return mx.quantized_matmul(
        x, w.weight, scales=w.scales, biases=w.biases, transpose=True, group_size=w.group_size, bits=w.bits
    )
