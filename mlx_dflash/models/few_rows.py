"""Passes of few rows, in which kernels run the quantized products and the attention of a model.

Knows which layers and which attention the kernels can take; the kernels themselves choose where they are used.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import mlx.core as mx
import mlx.nn as nn

from ..kernels import Kernels, Keys, Quantized, Sight
from .stand_ins import Replacement, standing_in

Linears = list[tuple[nn.Module, str, nn.QuantizedLinear]]


def quantized_linears(model: nn.Module) -> Linears:
    """Return the affine-quantized linear layers of a model, each with the module that holds it and its name there."""
    return [
        (module, name, child)
        for module in model.modules()
        for name, child in module.items()
        if type(child) is nn.QuantizedLinear and getattr(child, "mode", "affine") == "affine"
    ]


@contextmanager
def by_kernels(linears: Linears, kernels: Kernels) -> Iterator[None]:
    """Let kernels run these layers, and attention with a plain mask, in passes made inside the scope."""
    multiply = partial(_multiply, kernels)
    replacements = [Replacement(module, name, multiply) for module, name, _ in linears]
    attention = Replacement(vars(mx.fast), "scaled_dot_product_attention", partial(_attend, kernels))
    with standing_in([*replacements, attention]):
        yield


def _multiply(kernels: Kernels, linear: nn.QuantizedLinear, x: mx.array) -> mx.array:
    weights = Quantized(linear.weight, linear.scales, linear.biases, linear.group_size, linear.bits)
    product = kernels.multiply(x, weights)
    return product + linear["bias"] if "bias" in linear else product


def _attend(kernels: Kernels, stock, q: mx.array, k: mx.array, v: mx.array, **options) -> mx.array:
    """Attend by kernels where the mask is plain and the rows are few; options: as in MLX's own function, `stock`."""
    rows, keys, mask = q.shape[2], k.shape[2], options.get("mask")
    is_plain = (mask is None or isinstance(mask, str)) and not options.keys() - {"scale", "mask", "sinks"}
    if not is_plain or not 1 < rows <= keys:
        return stock(q, k, v, **options)
    sight = Sight(causal=mask == "causal")
    return kernels.attend(q, Keys(k, v, keys - rows), sight, options["scale"], options.get("sinks"))
