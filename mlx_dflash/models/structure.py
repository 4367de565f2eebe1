"""Where an mlx-lm model keeps its layers, its embedding and its head.

They are found by structure, not by family, and are not changed. Knows models; knows nothing of caches or drafts.
"""

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn

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


class Structure:
    """The layers, the embedding and the head of a model.

    layers: in the order of their numbers. places: for each layer the containers and keys where the model keeps it.
    unembed: the head, (1, T, D) -> (1, T, V).
    Raises ValueError that says what was looked for.
    """

    def __init__(self, model: nn.Module):
        self.layers, self.places = _find_layers(model)
        self._calls_layers = True
        self.embedding = _find_embedding(model, self.layers)
        head = _find_head(model, self.layers, self.vocab_size)
        self.unembed: Callable[[mx.array], mx.array] = self.embedding.as_linear if head is None else head

    @property
    def calls_layers(self) -> bool:
        """Whether the model calls its layers, as far as is known; a model may call their parts itself."""
        return self._calls_layers

    def tap_entrances(self) -> bool:
        """Tap the parts of layers from now on, for a model that was seen to call no layer; return whether it is new."""
        is_new, self._calls_layers = self._calls_layers, False
        return is_new

    @property
    def vocab_size(self) -> int:
        """Number of rows of the embedding table."""
        return self.embedding.weight.shape[0]

    def embed(self, ids: mx.array) -> mx.array:
        """Return the rows (B, T, D) of the embedding table for ids (B, T)."""
        return self.embedding(ids)


def check_layer_ids(target_layer_ids: Sequence[int], num_layers: int) -> tuple[int, ...]:
    """Return the tap layers. Raises ValueError if one is not a layer of the target."""
    wrong = [i for i in target_layer_ids if not 0 <= i < num_layers]
    if wrong:
        raise ValueError(
            f"the draft taps layers {list(target_layer_ids)}, but the target has {num_layers} layers, "
            f"0 to {num_layers - 1}; was the draft trained for another target?"
        )
    return tuple(target_layer_ids)


def _find_layers(model: nn.Module) -> tuple[list[nn.Module], list[list[tuple[Any, Any]]]]:
    """Return the layers, and for each the containers and keys where the model keeps it; model.layers may be a copy."""
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
    """Return the modules that are not part of a layer, each with the last part of its name."""
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
    """Return the module that turns hidden states into logits; None if the embedding does."""
    for name, module in _outside(model, layers):
        if name in _HEAD_NAMES and (name == "lm_head" or getattr(module, "weight", mx.zeros(0)).shape[0] == vocab_size):
            return module
    return None
