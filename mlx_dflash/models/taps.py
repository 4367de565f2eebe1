"""Taps: the outputs of a model's layers, recorded in a scope, and the context features made of them.

Knows where a model keeps its layers, from structure.py; knows nothing of caches or drafts.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from .stand_ins import Replacement, standing_in
from .structure import Structure


@contextmanager
def tapped(structure: Structure, layer_ids: Sequence[int]) -> Iterator[dict[int, Any]]:
    """Record the outputs of some layers, by their number, of the forward passes made inside the scope.

    Of a layer that runs more than once in a pass, the last output counts. A model that calls the parts of its layers
    itself is tapped where it enters the next layer: what a layer returns is what the next one is given.
    """
    outputs: dict[int, Any] = {}
    taps = _taps_of_layers if structure.calls_layers else _taps_of_entrances
    with standing_in([tap for i in set(layer_ids) for tap in taps(structure, i, outputs)]):
        yield outputs


def _taps_of_layers(structure: Structure, i: int, outputs: dict[int, Any]) -> list[Replacement]:
    def record(layer, *args, **kwargs):
        out = layer(*args, **kwargs)
        outputs[i] = out
        return out

    return [Replacement(container, key, record) for container, key in structure.places[i]]


def _taps_of_entrances(structure: Structure, i: int, outputs: dict[int, Any]) -> list[Replacement]:
    if i + 1 == len(structure.layers):
        return []
    container, key = structure.places[i + 1][0]
    entered = container[key]
    first: list[str] = []  # the part that the model calls first

    def record(name, part, *args, **kwargs):
        if not first:
            first.append(name)
        if name in first:
            outputs[i] = args[0]
        return part(*args, **kwargs)

    parts = [name for name, part in entered.items() if isinstance(part, nn.Module)]
    return [Replacement(entered, name, partial(record, name)) for name in parts]


def features_of(outputs: dict[int, Any], layer_ids: Sequence[int], tokens: int, model: nn.Module) -> mx.array:
    """Return the context features (1, T, taps * D) in what the layers returned for T tokens.

    Of several things a layer returns the first counts; several residual streams count as one wide one.
    Raises ValueError for a layer that returned nothing, or no hidden states.
    """
    missing = [i for i in layer_ids if i not in outputs]
    if missing:
        raise ValueError(
            f"{type(model).__module__} never calls the entries {missing} of its layer list, so they cannot be tapped"
        )
    taps = []
    for i in layer_ids:
        out = outputs[i]
        if isinstance(out, (tuple, list)):
            out = out[0]
        if out.ndim == 4 and out.shape[:2] != (1, tokens):  # (streams, 1, T, D)
            out = out.transpose(1, 2, 0, 3)
        if out.ndim < 3 or out.shape[:2] != (1, tokens):
            raise ValueError(
                f"layer {i} of {type(model).__module__} returns {out.shape} for {tokens} tokens; "
                f"expected (1, {tokens}, D)"
            )
        taps.append(out.reshape(1, tokens, -1))
    return mx.concatenate(taps, axis=-1)
