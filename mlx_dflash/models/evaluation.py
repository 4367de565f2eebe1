"""Evaluation of everything that a model holds, so that it can run in any thread.

What is pending in MLX can only be computed in the thread that made it. Parameters are evaluated when they are loaded;
other arrays, such as the frequencies of a scaled RoPE, are not among the parameters.
Knows modules and arrays; knows nothing of what they compute.
"""

from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import mlx.nn as nn


def evaluate(model: nn.Module) -> None:
    """Evaluate all arrays that a model and its modules hold, under any name."""
    mx.eval([array for _, module in model.named_modules() for array in _arrays([dict(module), vars(module)])])


def _arrays(value: Any) -> Iterator[mx.array]:
    if isinstance(value, mx.array):
        yield value
    elif isinstance(value, nn.Module):
        return  # visited by itself
    elif isinstance(value, dict):
        yield from (array for item in value.values() for array in _arrays(item))
    elif isinstance(value, (list, tuple)):
        yield from (array for item in value for array in _arrays(item))
