"""Does a conversion compute what its source computes? Both are loaded and run on the same random input.

Knows how to run drafts and targets; writes nothing.
"""

from pathlib import Path
from typing import NamedTuple

import mlx.core as mx
import mlx.nn as nn

from mlx_dflash.checkpoints.drafts import build_draft, load_draft, read_draft
from mlx_dflash.checkpoints.packing import unpacked
from mlx_dflash.draft.model import DraftModel
from mlx_dflash.files.gguf import GGUFFile

NUM_TOKENS = 24


class Comparison(NamedTuple):
    """The difference of two arrays of logits or hidden rows.

    largest: of all differences. relative: RMS of the differences, over that of the source. agreement: share of rows
    whose best entry is the same.
    """

    largest: float
    relative: float
    agreement: float

    def __str__(self) -> str:
        if self.largest == 0:
            return "the same as the source, bit for bit"
        return (
            f"largest difference {self.largest:.3g}, relative {self.relative:.3g} (RMS), "
            f"same best entry in {self.agreement:.0%} of rows"
        )


def compare(ours: mx.array, source: mx.array) -> Comparison:
    """Compare rows (T, n). Raises ValueError unless all of ours are finite."""
    ours, source = ours.astype(mx.float32), source.astype(mx.float32)
    if not mx.all(mx.isfinite(ours)).item():
        raise ValueError("the converted model computes values that are not finite")
    relative = mx.linalg.norm(ours - source) / mx.linalg.norm(source)
    agreement = (ours.argmax(-1) == source.argmax(-1)).mean()
    return Comparison(mx.abs(ours - source).max().item(), relative.item(), agreement.item())


def check_draft(folder: Path, source: Path, is_exact: bool) -> Comparison:
    """Compare a converted draft's hidden rows with its source's, in float32 unless they must be equal.

    is_exact: raise ValueError unless they are equal in the element types that both have.
    """
    drafts = (
        build_draft(*read_draft(path), path) if is_exact else load_draft(str(path), dtype=mx.float32)
        for path in (folder, source)
    )
    return _judged(compare(*map(draft_rows, drafts)), is_exact)


def check_target(folder: Path, source: str, revision: str | None) -> Comparison:
    """Compare a converted target's logits with those of its source, loaded one after the other."""
    import mlx_lm

    rows = []
    for path, commit in ((str(folder), None), (source, revision)):
        model, _ = mlx_lm.load(path, revision=commit)
        rows.append(target_rows(model))
        mx.eval(rows)
        del model
        mx.clear_cache()
    return compare(*rows)


def check_gguf(folder: Path, source: Path) -> Comparison:
    """Compare the converted target's logits with those of the weights as the gguf package unpacks them, in float32."""
    from mlx_lm.utils import load_model

    from .gguf_target import model_weights

    rows = []
    for is_source in (False, True):
        model, config = load_model(folder, lazy=True)
        model = unpacked(model)
        if is_source:
            model.load_weights(list(model_weights(GGUFFile(source, unpacks=True), config).items()), strict=False)
        rows.append(target_rows(model))
        mx.eval(rows)
        del model
        mx.clear_cache()
    return compare(*rows)


def draft_rows(draft: DraftModel) -> mx.array:
    """Hidden rows (L, H) of a block of random embeddings behind random context features."""
    config, caches = draft.config, draft.make_cache()
    context, block = mx.random.key(1), mx.random.key(2)
    width = len(config.target_layer_ids) * config.target_hidden_size
    draft.project_context(mx.random.normal((1, NUM_TOKENS, width), key=context), caches)
    return draft(mx.random.normal((1, config.block_size, config.hidden_size), key=block), caches)[0]


def target_rows(model: nn.Module) -> mx.array:
    """Logits (T, V) of random tokens."""
    from mlx_dflash.models.structure import Structure

    tokens = mx.random.randint(0, Structure(model).vocab_size, (1, NUM_TOKENS), key=mx.random.key(1))
    return model(tokens)[0]


def _judged(comparison: Comparison, is_exact: bool) -> Comparison:
    if is_exact and comparison.largest != 0:
        raise ValueError(f"the conversion should be exact but differs from its source: {comparison}")
    return comparison
