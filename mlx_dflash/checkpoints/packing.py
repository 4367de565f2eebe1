"""Quantized weights on the device: packed on a GPU, unpacked on the CPU.

There MLX has no fast products of packed weights. Knows modules of MLX; knows nothing of targets and drafts.
"""

import mlx.core as mx
import mlx.nn as nn


def is_unpacked_here() -> bool:
    """Say whether the loaders unpack quantized weights to 32 bits on the default device."""
    return mx.default_device().type == mx.DeviceType.cpu


def fit_to_device(model: nn.Module) -> nn.Module:
    """Return a quantized model as it is on a GPU, unpacked to float32 on the CPU."""
    if not is_unpacked_here():
        return model
    model = unpacked(model)
    mx.eval(model.parameters())
    return model


def unpacked(model: nn.Module) -> nn.Module:
    """Return a model in float32, with the matrices that its quantized ones stand for."""
    from mlx_lm.utils import dequantize_model

    model.set_dtype(mx.float32)  # first the scales: the products must not round to their type
    model = dequantize_model(model)
    model.set_dtype(mx.float32)  # matrices whose scales are no floats come out in bfloat16
    return model
