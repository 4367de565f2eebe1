"""Where an mlx-lm model keeps its layers, its embedding and its head, and what its layers return.

Found by structure, not by family. Observes the layers, never changes them: the tapped entries of the layer list
record their output inside a scope and are restored when it ends. Kernels for the few rows of a verify, and rotations
that all layers share, come and go in the same way. Knows models; knows nothing of caches or drafts.
"""

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..kernels import Kernels, Keys, Quantized, Sight

_EMBEDDING_NAMES = (
    "embed_tokens",
    "tok_embeddings",
    "word_embeddings",
    "token_embeddings",
    "wte",
    "embedding",
    "embeddings",
    "embed_in",
    "embed",
)
_HEAD_NAMES = ("lm_head", "output", "embed_out")
# One scope at a time: a layer list is shared by all sequences of its model.
_scope = threading.RLock()


class Structure:
    """Where a model keeps its layers, its embedding and its head, found by structure.

    Raises ValueError that says what was looked for.
    """

    def __init__(self, model: nn.Module):
        self.layers, self.places = _find_layers(model)
        self.calls_layers = True  # until it is seen to call their parts itself
        self.embedding = _find_embedding(model, self.layers)
        head = _find_head(model, self.layers, self.vocab_size)
        self.unembed: Callable[[mx.array], mx.array] = self.embedding.as_linear if head is None else head

    @property
    def vocab_size(self) -> int:
        return self.embedding.weight.shape[0]

    def embed(self, ids: mx.array) -> mx.array:
        """ids: (B, T). Returns (B, T, D), rows of the embedding table."""
        return self.embedding(ids)


def check_layer_ids(target_layer_ids: Sequence[int], num_layers: int) -> tuple[int, ...]:
    """Return the tap layers. Raises ValueError if one is not a layer of the target."""
    wrong = [i for i in target_layer_ids if not 0 <= i < num_layers]
    if wrong:
        raise ValueError(
            f"the draft taps layers {list(target_layer_ids)}, but the target has {num_layers} layers, 0 to {num_layers - 1}; "
            "was the draft trained for another target?"
        )
    return tuple(target_layer_ids)


@contextmanager
def tapped(structure: Structure, layer_ids: Sequence[int]) -> Iterator[dict[int, Any]]:
    """Record the outputs of some layers, by their number, of the forward passes made inside the scope.

    Of a layer that runs more than once in a pass, the last output counts.
    """
    outputs: dict[int, Any] = {}
    # What a layer returns is what the next one is given.
    kind, shift = (_Tap, 0) if structure.calls_layers else (_Entrance, 1)
    with _scope:
        places = [
            (*place, i)
            for i in set(layer_ids)
            if i + shift < len(structure.layers)
            for place in structure.places[i + shift]
        ]
        originals = [container[key] for container, key, _ in places]
        try:
            for (container, key, i), layer in zip(places, originals):
                _put(container, key, kind(layer, lambda out, i=i: outputs.__setitem__(i, out)))
            yield outputs
        finally:
            for (container, key, _), layer in zip(places, originals):
                _put(container, key, layer)


def _put(container: dict | list, key: Any, value: Any) -> None:
    """Replace an entry where it is, also in a module, which would register it anew."""
    (dict if isinstance(container, dict) else list).__setitem__(container, key, value)


class _StandIn:
    """Stands where a model keeps a layer, and is like it but for what a subclass does in the thread that opened the scope."""

    def __init__(self, layer: nn.Module):
        self._layer, self._thread = layer, threading.get_ident()

    @property
    def _is_in_scope(self) -> bool:
        return threading.get_ident() == self._thread

    def __getattr__(self, name: str):
        return getattr(self._layer, name)

    @property
    def __class__(self):
        """The layer's class, for the models that tell their layers apart by isinstance."""
        return type(self._layer)


class _Tap(_StandIn):
    """Stands in a layer list for a layer and records what it returns."""

    def __init__(self, layer: nn.Module, record: Callable[[Any], None]):
        super().__init__(layer)
        self._record = record

    def __call__(self, *args, **kwargs):
        out = self._layer(*args, **kwargs)
        if self._is_in_scope:
            self._record(out)
        return out


class _Entrance(_Tap):
    """Stands for a layer whose parts the model calls itself; records what the part that it calls first is given."""

    _first: str | None = None

    def __getattr__(self, name: str):
        part = getattr(self._layer, name)
        return partial(self._enter, name, part) if isinstance(part, nn.Module) and self._first in (None, name) else part

    def _enter(self, name: str, part: nn.Module, *args, **kwargs):
        if self._first in (None, name) and self._is_in_scope:
            self._first = name
            self._record(args[0])
        return part(*args, **kwargs)


class _FewRows(_StandIn):
    """Stands for a quantized linear layer and lets kernels multiply."""

    def __init__(self, linear: nn.QuantizedLinear, kernels: Kernels):
        super().__init__(linear)
        self._kernels = kernels

    def __call__(self, x: mx.array) -> mx.array:
        linear = self._layer
        if not self._is_in_scope:
            return linear(x)
        weights = Quantized(linear.weight, linear.scales, linear.biases, linear.group_size, linear.bits)
        product = self._kernels.multiply(x, weights)
        return product + linear["bias"] if "bias" in linear else product


def quantized_linears(model: nn.Module) -> list[tuple[nn.Module, str, nn.QuantizedLinear]]:
    """The affine-quantized linear layers of a model, each with the module that holds it and its name there."""
    return [
        (module, name, child)
        for module in model.modules()
        for name, child in module.items()
        if type(child) is nn.QuantizedLinear and getattr(child, "mode", "affine") == "affine"
    ]


@contextmanager
def _in_place_of(name: str, stand_in: Callable) -> Iterator[None]:
    """Let this thread's calls of mx.fast.name, inside the scope, be calls of stand_in, which gets MLX's own first."""
    with _scope:
        stock, thread = getattr(mx.fast, name), threading.get_ident()

        def call(*args, **kwargs):
            return stand_in(stock, *args, **kwargs) if threading.get_ident() == thread else stock(*args, **kwargs)

        try:
            setattr(mx.fast, name, call)
            yield
        finally:
            setattr(mx.fast, name, stock)


@contextmanager
def by_kernels(linears: list[tuple[nn.Module, str, nn.QuantizedLinear]], kernels: Kernels) -> Iterator[None]:
    """Let kernels run these layers, and attention with a plain mask, in passes made inside the scope."""

    def attend(stock, q, k, v, *, scale, mask=None, sinks=None, **options):
        rows, keys = q.shape[2], k.shape[2]
        plain = (mask is None or isinstance(mask, str)) and not options
        if not plain or not 1 < rows <= keys:
            return stock(q, k, v, scale=scale, mask=mask, sinks=sinks, **options)
        return kernels.attend(q, Keys(k, v, keys - rows), Sight(causal=mask == "causal"), scale, sinks)

    with _in_place_of("scaled_dot_product_attention", attend):
        try:
            for module, name, linear in linears:
                dict.__setitem__(module, name, _FewRows(linear, kernels))
            yield
        finally:
            for module, name, linear in linears:
                dict.__setitem__(module, name, linear)


@contextmanager
def shared_rotations() -> Iterator[None]:
    """On the CPU, compute the angles of RoPE once for all layers of a pass made inside the scope.

    MLX's CPU backend composes RoPE of some forty operations, more than half of all that a small model consists of, and
    most of them give the same cosines and sines in every layer. The results are the same, bit for bit.
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

    with _in_place_of("rope", rotate):
        yield


def _rotation(rows: int, dims: int, base: float, scale: float, offset: int) -> tuple[mx.array, mx.array]:
    """Factors (rows, dims) of a vector and of its swapped halves, at positions offset to offset + rows - 1."""
    half = dims // 2
    positions = (mx.arange(rows, dtype=mx.float32) + offset) * scale
    frequencies = mx.exp(mx.arange(0, -half, -1, dtype=mx.float32) * (math.log(base) / half))
    angles = positions[:, None] * frequencies
    cos, sin = mx.cos(angles), mx.sin(angles)
    return mx.concatenate([cos, cos], axis=-1), mx.concatenate([-sin, sin], axis=-1)


def features_of(outputs: dict[int, Any], layer_ids: Sequence[int], tokens: int, model: nn.Module) -> mx.array:
    """The context features (1, T, taps * D) in what the layers returned for T tokens.

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
                f"layer {i} of {type(model).__module__} returns {out.shape} for {tokens} tokens; expected (1, {tokens}, D)"
            )
        taps.append(out.reshape(1, tokens, -1))
    return mx.concatenate(taps, axis=-1)


def _find_layers(model: nn.Module) -> tuple[list[nn.Module], list[list[tuple[Any, Any]]]]:
    """The layers, and for each the containers and keys where the model keeps it; model.layers may be a copy."""
    layers = list(getattr(model, "layers", None) or ())
    if not layers:
        raise ValueError(
            f"{type(model).__module__} has no layers; expected a model of mlx-lm with the attribute 'layers'"
        )
    places: dict[int, list[tuple[Any, Any]]] = {id(layer): [] for layer in layers}

    def look(container: dict | list) -> None:
        for key, value in container.items() if isinstance(container, dict) else enumerate(container):
            if id(value) in places:
                places[id(value)].append((container, key))
            elif isinstance(value, list) or type(value) is dict:
                look(value)

    for _, module in model.named_modules():
        look(module)
    lost = [i for i, layer in enumerate(layers) if not places[id(layer)]]
    if lost:
        raise ValueError(
            f"the layers {lost} of {type(model).__module__} were not found in any list or attribute of its modules"
        )
    return layers, [places[id(layer)] for layer in layers]


def _outside(model: nn.Module, layers: list[nn.Module]) -> list[tuple[str, nn.Module]]:
    """The last names and modules of a model that are not part of a layer."""
    inside = {id(m) for layer in layers for _, m in layer.named_modules()}
    return [(path.rpartition(".")[2], m) for path, m in model.named_modules() if id(m) not in inside]


def _find_embedding(model: nn.Module, layers: list[nn.Module]) -> nn.Module:
    tables = [(name, m) for name, m in _outside(model, layers) if hasattr(m, "as_linear")]
    for wanted in _EMBEDDING_NAMES:
        for name, module in tables:
            if name == wanted:
                return module
    raise ValueError(
        f"no token embedding was found in {type(model).__module__}; looked for a module with as_linear named "
        f"{', '.join(_EMBEDDING_NAMES)}, found {', '.join(name for name, _ in tables) or 'none'}"
    )


def _find_head(model: nn.Module, layers: list[nn.Module], vocab_size: int) -> Callable[[mx.array], mx.array] | None:
    """The module that turns hidden states into logits; None if the embedding does."""
    for name, module in _outside(model, layers):
        if name in _HEAD_NAMES and (name == "lm_head" or getattr(module, "weight", mx.zeros(0)).shape[0] == vocab_size):
            return module
    return None
