"""A frozen mlx-lm model as the target of one sequence: prefill, verify, commit.

Observes the model's layers, never changes them: the tapped entries of its layer list record their output inside a
scope and are restored when it ends. Kernels for the few rows of a verify come and go in the same way. Knows mlx-lm's
models and caches (with rollback.py); knows nothing of drafts.
"""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

from . import rollback
from .kernels import Kernels, Keys, Quantized, Sight

_EMBEDDING_NAMES = ("embed_tokens", "tok_embeddings", "word_embeddings", "wte", "embedding", "embeddings")
_PROBE = 4  # tokens
# One scope at a time: a layer list is shared by all sequences of its model.
_scope = threading.RLock()


@dataclass(frozen=True)
class Scores:
    """One verify: logits (γ + 1, V) of the anchor's and the drafts' rows, context features (1, γ + 1, T * D)."""

    logits: mx.array
    features: mx.array


class _Tap:
    """Stands in a layer list for a layer and records what it returns, in the thread that opened the scope."""

    def __init__(self, layer: nn.Module, record: Callable[[mx.array], None]):
        self._layer, self._record, self._thread = layer, record, threading.get_ident()

    def __call__(self, *args, **kwargs):
        out = self._layer(*args, **kwargs)
        if threading.get_ident() == self._thread:
            self._record(out)
        return out

    def __getattr__(self, name: str):
        return getattr(self._layer, name)


class Structure:
    """Where a model keeps its layers, its embedding and its head, found by structure.

    Raises ValueError that says what was looked for.
    """

    def __init__(self, model: nn.Module):
        self.layers = _layer_list(model)
        self.embedding = _embedding(model)
        head = _find(model, lambda name, m: name == "lm_head")
        self.unembed: Callable[[mx.array], mx.array] = self.embedding.as_linear if head is None else head

    @property
    def vocab_size(self) -> int:
        return self.embedding.weight.shape[0]

    def embed(self, ids: mx.array) -> mx.array:
        """ids: (B, T). Returns (B, T, D), rows of the embedding table."""
        return self.embedding(ids)


class Target:
    """A model seen by one sequence.

    target_layer_ids: layers whose outputs are the context features, in that order. caches: the model's prompt cache;
    its entries are replaced, in place, by ones that can roll back. block_size: most rows of a verify. kernels: may
    run a verify's attention and quantized products; without them, stock MLX operations do.
    Between calls the caches cover exactly the committed tokens.
    Raises ValueError for layers the model does not have, and for caches that cannot roll back.
    """

    def __init__(
        self,
        model: nn.Module,
        target_layer_ids: Sequence[int],
        caches: list[Any] | None = None,
        block_size: int = 16,
        kernels: Kernels | None = None,
    ):
        self.model = model
        self.kernels = kernels or Kernels("off")
        self._linears: list[tuple[nn.Module, str, nn.QuantizedLinear]] | None = None
        self.structure = Structure(model)
        self.target_layer_ids = check_layer_ids(target_layer_ids, len(self.structure.layers))
        self.caches = make_prompt_cache(model) if caches is None else caches
        rollback.adopt(self.caches, slack=block_size)
        self._block_rows = 0  # rows of the latest block that the caches hold

    @property
    def length(self) -> int:
        """Number of tokens that the caches cover."""
        return max(rollback.lengths(self.caches), default=0)

    def reserve(self, tokens: int) -> None:
        """Make room for this many tokens in all at the next growth."""
        for cache in self.caches:
            if hasattr(cache, "reserve"):
                cache.reserve(tokens)

    def prefill(
        self,
        tokens: mx.array,
        on_features: Callable[[mx.array], None],
        step_size: int = 2048,
        progress: Callable[[int], None] = lambda processed: None,
    ) -> None:
        """Commit tokens (T,) chunk by chunk. on_features gets each chunk's context features (1, S, T * D).

        progress is called with the number of tokens processed so far. No logits are computed.
        """
        for start in range(0, tokens.size, step_size):
            chunk = tokens[start : start + step_size]
            _, features = self._forward(chunk)
            on_features(features)
            mx.eval(features, [cache.state for cache in self.caches])
            progress(start + chunk.size)
            mx.clear_cache()

    def verify(self, anchor: int | mx.array, drafts: mx.array) -> Scores:
        """Run the target over [anchor, drafts]: one pass, γ + 1 rows, uncommitted until commit. drafts: (γ,) ids."""
        block = mx.concatenate([mx.array(anchor).reshape(1).astype(mx.uint32), drafts])
        if self.kernels.can_run:
            logits, features = self._forward_by_kernels(block)
        else:
            logits, features = self._forward(block)
        self._block_rows = block.size
        return Scores(logits[0], features)

    def commit(self, num_rows: int) -> None:
        """Keep the first num_rows rows of the verified block, forget the rest.

        May be called again, with fewer rows, until the next verify.
        """
        assert 0 <= num_rows <= self._block_rows, f"commit of {num_rows} rows out of {self._block_rows}"
        rollback.drop_rows(self.caches, self._block_rows - num_rows)
        self._block_rows = num_rows

    def can_rewind(self, length: int) -> bool:
        """Whether the caches can go back to covering the first `length` tokens only."""
        return rollback.can_drop_rows(self.caches, self.length - length)

    def rewind(self, length: int) -> None:
        """Go back to covering the first `length` tokens only."""
        rollback.drop_rows(self.caches, self.length - length)
        self._block_rows = 0

    def _forward_by_kernels(self, block: mx.array) -> tuple[mx.array, mx.array]:
        """As _forward, with kernels where they are chosen, and again without them if the result is not finite."""
        started = time.perf_counter()
        if self._linears is None:
            self._linears = quantized_linears(self.model)
        with by_kernels(self._linears, self.kernels):
            result = self._forward(block)
        if self.kernels.distrusts(result[0], started):
            rollback.drop_rows(self.caches, block.size)
            result = self._forward(block)
        return result

    def _forward(self, tokens: mx.array) -> tuple[mx.array, mx.array]:
        """tokens: (T,). Returns logits (1, T, V) and context features (1, T, taps * D); all or no caches advance."""
        before = rollback.lengths(self.caches)
        try:
            with tapped(self.structure.layers, self.target_layer_ids) as outputs:
                logits = self.model(tokens[None], cache=self.caches)
        except BaseException:
            for cache, length, now in zip(self.caches, before, rollback.lengths(self.caches)):
                rollback.drop_rows([cache], now - length)
            raise
        return logits, mx.concatenate([outputs[i] for i in self.target_layer_ids], axis=-1)


def probe(model: nn.Module, target_layer_ids: Sequence[int]) -> int:
    """Check on a few tokens that tapping changes no bit of the logits; return the width of one tap.

    Raises ValueError if it does, or if a tapped layer returns no hidden states.
    """
    structure = Structure(model)
    tokens = mx.arange(_PROBE)[None] % structure.vocab_size
    plain = model(tokens, cache=make_prompt_cache(model))
    with tapped(structure.layers, target_layer_ids) as outputs:
        observed = model(tokens, cache=make_prompt_cache(model))
    missing = [i for i in target_layer_ids if i not in outputs]
    if missing:
        raise ValueError(f"{type(model).__module__} never calls the entries {missing} of its layer list, so they cannot be tapped")
    widths = {outputs[i].shape[-1] for i in target_layer_ids}
    if len(widths) != 1 or any(outputs[i].shape[:2] != tokens.shape for i in target_layer_ids):
        raise ValueError(f"the tapped layers return shapes {[outputs[i].shape for i in target_layer_ids]}; expected (1, {_PROBE}, D)")
    if not mx.array_equal(plain, observed, equal_nan=True).item():
        raise ValueError(f"tapping layers {list(target_layer_ids)} of {type(model).__module__} changes its logits")
    return widths.pop()


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
def tapped(layers: list[nn.Module], layer_ids: Sequence[int]) -> Iterator[dict[int, mx.array]]:
    """Record the outputs of some layers, by their number, of the forward passes made inside the scope."""
    outputs: dict[int, mx.array] = {}
    with _scope:
        originals = {i: layers[i] for i in set(layer_ids)}
        try:
            for i, layer in originals.items():
                layers[i] = _Tap(layer, lambda out, i=i: outputs.__setitem__(i, out))
            yield outputs
        finally:
            for i, layer in originals.items():
                layers[i] = layer


class _FewRows:
    """Stands in for a quantized linear layer in the thread that opened the scope."""

    def __init__(self, linear: nn.QuantizedLinear, kernels: Kernels):
        self._linear, self._kernels, self._thread = linear, kernels, threading.get_ident()

    def __call__(self, x: mx.array) -> mx.array:
        linear = self._linear
        if threading.get_ident() != self._thread:
            return linear(x)
        weights = Quantized(linear.weight, linear.scales, linear.biases, linear.group_size, linear.bits)
        product = self._kernels.multiply(x, weights)
        return product + linear["bias"] if "bias" in linear else product

    def __getattr__(self, name: str):
        return getattr(self._linear, name)


def quantized_linears(model: nn.Module) -> list[tuple[nn.Module, str, nn.QuantizedLinear]]:
    """The affine-quantized linear layers of a model, each with the module that holds it and its name there."""
    return [
        (module, name, child)
        for module in model.modules()
        for name, child in module.items()
        if type(child) is nn.QuantizedLinear and getattr(child, "mode", "affine") == "affine"
    ]


@contextmanager
def by_kernels(linears: list[tuple[nn.Module, str, nn.QuantizedLinear]], kernels: Kernels) -> Iterator[None]:
    """Let kernels run these layers, and attention with a plain mask, in passes made inside the scope."""
    stock, thread = mx.fast.scaled_dot_product_attention, threading.get_ident()

    def attend(q, k, v, *, scale, mask=None, sinks=None, **options):
        rows, keys = q.shape[2], k.shape[2]
        plain = (mask is None or isinstance(mask, str)) and not options
        if threading.get_ident() != thread or not plain or not 1 < rows <= keys:
            return stock(q, k, v, scale=scale, mask=mask, sinks=sinks, **options)
        return kernels.attend(q, Keys(k, v, keys - rows), Sight(causal=mask == "causal"), scale, sinks)

    with _scope:
        try:
            mx.fast.scaled_dot_product_attention = attend
            for module, name, linear in linears:
                dict.__setitem__(module, name, _FewRows(linear, kernels))
            yield
        finally:
            mx.fast.scaled_dot_product_attention = stock
            for module, name, linear in linears:
                dict.__setitem__(module, name, linear)


def _layer_list(model: nn.Module) -> list[nn.Module]:
    """The list object that the model iterates; model.layers may be a copy of it."""
    layers = getattr(model, "layers", None)
    if not layers:
        raise ValueError(f"{type(model).__module__} has no layers; expected a model of mlx-lm with the attribute 'layers'")
    found = [
        value
        for _, module in model.named_modules()
        for value in module.values()
        if isinstance(value, list) and len(value) == len(layers) and all(a is b for a, b in zip(value, layers))
    ]
    if not found:
        raise ValueError(f"no list of {len(layers)} layers was found inside {type(model).__module__}")
    return found[0]


def _find(model: nn.Module, matches: Callable[[str, nn.Module], bool]) -> nn.Module | None:
    for path, module in model.named_modules():
        if matches(path.rpartition(".")[2], module):
            return module
    return None


def _embedding(model: nn.Module) -> nn.Module:
    for name in _EMBEDDING_NAMES:
        found = _find(model, lambda n, m: n == name and hasattr(m, "as_linear"))
        if found is not None:
            return found
    raise ValueError(f"no token embedding was found in {type(model).__module__}; looked for {', '.join(_EMBEDDING_NAMES)}")
