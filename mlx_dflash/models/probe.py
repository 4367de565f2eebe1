"""A trial of a model on a few tokens: whether it can be tapped, and whether it can verify a block.

Knows models; knows nothing of drafts.
"""

from collections.abc import Sequence

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

from .structure import Structure
from .taps import features_of, tapped

_TOKENS = 4
# Both tolerances are parts of the spread of the logits. Rounding, also that of quantized models, stays far below the
# first. The second is for the same pass twice: a GPU may add in another order, the CPU does not.
_TOLERANCE = 0.1
_GPU_TOLERANCE = 1e-3


def probe(model: nn.Module, target_layer_ids: Sequence[int], structure: Structure | None = None) -> int:
    """Check that a model can be tapped and can verify blocks; return the width of one tap.

    structure: the model's, if it is known; it learns whether the model calls its layers.
    Raises ValueError if the model cannot do either.
    """
    structure = structure or Structure(model)
    tokens = mx.arange(_TOKENS)[None] % structure.vocab_size
    plain = model(tokens, cache=make_prompt_cache(model))
    features = _check_taps(model, structure, target_layer_ids, tokens, plain)
    _check_blocks(model, tokens, plain)
    return features.shape[-1] // len(target_layer_ids)


def _check_taps(
    model: nn.Module, structure: Structure, layer_ids: Sequence[int], tokens: mx.array, plain: mx.array
) -> mx.array:
    """Check that tapping changes no bit of the logits `plain` (1, T, V); return the features (1, T, taps * D).

    Raises ValueError if it does, on a GPU beyond rounding, or if a tapped layer returns no hidden states.
    """
    logits, outputs = _tapped_pass(model, structure, layer_ids, tokens)
    if not outputs and structure.tap_entrances():
        logits, outputs = _tapped_pass(model, structure, layer_ids, tokens)
    features = features_of(outputs, layer_ids, tokens.size, model)
    tolerance = 0 if mx.default_device() == mx.cpu else _GPU_TOLERANCE
    is_same = mx.array_equal(plain, logits, equal_nan=True).item()
    if not is_same and _distance(plain, logits) >= tolerance * _spread(plain):
        raise ValueError(f"tapping layers {list(layer_ids)} of {type(model).__module__} changes its logits")
    return features


def _tapped_pass(
    model: nn.Module, structure: Structure, layer_ids: Sequence[int], tokens: mx.array
) -> tuple[mx.array, dict]:
    with tapped(structure, layer_ids) as outputs:
        return model(tokens, cache=make_prompt_cache(model)), outputs


def _check_blocks(model: nn.Module, tokens: mx.array, plain: mx.array) -> None:
    """Raise ValueError if the logits `plain` (1, T, V), of all tokens at once, are not those of one after the other."""
    caches = make_prompt_cache(model)
    steps = mx.concatenate([model(tokens[:, i : i + 1], cache=caches) for i in range(tokens.size)], axis=1)
    error, spread = _distance(plain, steps), _spread(plain)
    if error > _TOLERANCE * spread:
        raise ValueError(
            f"{type(model).__module__} of mlx-lm gives other logits for {tokens.size} tokens at once than one by one "
            f"(off by {error:.2g} of {spread:.2g}), so it cannot verify a block"
        )


def _finite(logits: mx.array) -> mx.array:
    return mx.where(mx.isfinite(logits), logits, 0).astype(mx.float32)


def _distance(a: mx.array, b: mx.array) -> float:
    return mx.abs(_finite(a) - _finite(b)).max().item()


def _spread(logits: mx.array) -> float:
    return (_finite(logits).max() - _finite(logits).min()).item()
