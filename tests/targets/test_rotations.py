"""Rotations that the layers of a pass share are MLX's own, bit for bit."""

from itertools import product

import mlx.core as mx
import pytest
from support.targets import tiny_target

from mlx_dflash.models.rotations import shared_rotations
from mlx_dflash.target import Target

STOCK = mx.fast.rope
pytestmark = pytest.mark.skipif(mx.default_device() != mx.cpu, reason="other devices have a kernel for RoPE")


def rotate(x, dims=8, traditional=False, base=10000.0, scale=1.0, offset=3, freqs=None):
    return mx.fast.rope(x, dims, traditional=traditional, base=base, scale=scale, offset=offset, freqs=freqs)


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)
@pytest.mark.parametrize(["dims", "width"], [(8, 8), (4, 8), (2, 64), (64, 64), (128, 128)])
def test_shared_rotations_are_the_same_bits(dtype, dims, width):
    mx.random.seed(0)
    for rows, offset, base, scale in product((1, 5), (0, 1, 777), (10000.0, 5e6), (1.0, 0.25)):
        x = mx.random.normal((1, 3, rows, width)).astype(dtype)
        expected = rotate(x, dims, base=base, scale=scale, offset=offset)
        with shared_rotations():
            assert mx.fast.rope is not STOCK
            for _ in range(2):
                actual = rotate(x, dims, base=base, scale=scale, offset=offset)
                assert actual.dtype == expected.dtype and mx.array_equal(actual, expected).item(), (
                    rows,
                    offset,
                    base,
                    scale,
                )


def test_layers_that_differ_share_nothing():
    x = mx.random.normal((1, 2, 4, 16))
    kinds = [{}, {"dims": 16}, {"base": 5000.0}, {"scale": 0.5}, {"offset": 4}]
    expected = [rotate(x, **kind) for kind in kinds] + [rotate(x[:, :, :3])]
    with shared_rotations():
        actual = [rotate(x, **kind) for kind in kinds] + [rotate(x[:, :, :3])]
    assert all(mx.array_equal(a, b).item() for a, b in zip(actual, expected))


@pytest.mark.parametrize(
    "other",
    [
        {"traditional": True},
        {"offset": mx.array(3)},
        {"offset": mx.array([3, 9])},
        {"base": None, "freqs": mx.arange(1.0, 5.0)},
    ],
    ids=str,
)
def test_rotations_of_other_kinds_are_left_to_mlx(other):
    x = mx.random.normal((2, 2, 4, 8))
    expected = rotate(x, **other)
    with shared_rotations():
        assert mx.array_equal(rotate(x, **other), expected).item()


def test_a_verify_computes_the_angles_once(monkeypatch):
    model = tiny_target()
    target = Target(model, [0, 2])
    tables, calls, cos = [], [], mx.cos
    monkeypatch.setattr(mx, "cos", lambda x: tables.append(x.shape) or cos(x))
    monkeypatch.setattr(mx.fast, "rope", lambda *args, **kwargs: calls.append(args) or STOCK(*args, **kwargs))
    target.verify(5, mx.array([1, 2, 3], mx.uint32))
    assert len(model.layers) > 1
    assert len(tables) == 1 and not calls
