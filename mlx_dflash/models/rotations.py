"""Rotary position embeddings that all layers of a pass share, on the CPU.

Knows how MLX computes them; knows nothing of models.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager

import mlx.core as mx

from .stand_ins import Replacement, standing_in


@contextmanager
def shared_rotations() -> Iterator[None]:
    """On the CPU, compute the angles of RoPE once for all layers of a pass made inside the scope.

    MLX's CPU backend composes RoPE of some forty operations, which are more than half of all operations of a small
    model, and most of them give the same cosines and sines in every layer. The results are the same, bit for bit.
    """
    if mx.default_device() != mx.cpu:
        yield
        return
    tables: dict[tuple, tuple[mx.array, mx.array]] = {}

    def rotate(stock, a, dims, **kind):
        is_plain = (
            not kind["traditional"]
            and isinstance(kind["offset"], int)
            and kind.get("freqs") is None
            and kind.get("stream") is None
        )
        if not is_plain or a.ndim != 4:
            return stock(a, dims, **kind)
        angles = a.shape[2], dims, kind["base"], kind["scale"], kind["offset"]
        key = angles, a.dtype
        if key not in tables:
            tables[key] = tuple(factor.astype(a.dtype) for factor in _rotation(*angles))
        cos, sin = tables[key]
        turned, rest = a[..., :dims], a[..., dims:]
        turned = turned * cos + mx.roll(turned, dims // 2, axis=-1) * sin
        return mx.concatenate([turned, rest], axis=-1) if rest.size else turned

    with standing_in([Replacement(vars(mx.fast), "rope", rotate)]):
        yield


def _rotation(rows: int, dims: int, base: float, scale: float, offset: int) -> tuple[mx.array, mx.array]:
    """Return factors (rows, dims) of a vector and of its swapped halves, at positions offset to offset + rows - 1."""
    half = dims // 2
    positions = (mx.arange(rows, dtype=mx.float32) + offset) * scale
    frequencies = mx.exp(mx.arange(0, -half, -1, dtype=mx.float32) * (math.log(base) / half))
    angles = positions[:, None] * frequencies
    cos, sin = mx.cos(angles), mx.sin(angles)
    return mx.concatenate([cos, cos], axis=-1), mx.concatenate([-sin, sin], axis=-1)
