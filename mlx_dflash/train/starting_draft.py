"""The draft that a fit starts from: a new one of a chosen size, or a given one, with another block or head if asked.

Knows checkpoints of drafts, options, and how often the text has each token; knows nothing of training.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten

from ..checkpoints.drafts import build_draft, fetch_draft, read_draft
from ..checkpoints.packing import unpacked
from ..checkpoints.vocabulary import frequent, special_tokens
from ..draft.config import DraftConfig
from ..draft.model import DraftModel
from ..models.structure import Structure
from .new_draft import SIZES, draft_config, initialize, unused_token
from .options import FitOptions


@dataclass(frozen=True)
class Source:
    """The target and the text that a draft is made for.

    model: the target. counts: (V,), how often the text to learn has each token.
    """

    model: Any
    tokenizer: Any
    structure: Structure
    counts: np.ndarray

    def frequent(self, count: int) -> np.ndarray:
        """Return the ids of the `count` most frequent tokens, the special ones among them."""
        return frequent(self.counts, count, special_tokens(self.tokenizer))


@dataclass(frozen=True)
class StartingDraft:
    """A draft to be trained. config: as config.json. weights: in float32. origin: where they come from, in words."""

    config: dict[str, Any]
    weights: dict[str, mx.array]
    origin: str

    def model(self, path: Path) -> DraftModel:
        """Build the network. path: the place that error messages name."""
        return build_draft(self.config, self.weights, path)


def starting_draft(options: FitOptions, source: Source) -> StartingDraft:
    """Make the draft that the options ask for."""
    if options.init_draft:
        draft = _given(options.init_draft)
        if options.block_size is not None:
            draft = replace(draft, config=_with(draft.config, block_size=options.block_size))
    else:
        draft = _new(options, source)
    return draft if options.draft_vocab is None else _reduced(draft, source, options.draft_vocab)


def _given(name: str) -> StartingDraft:
    path = fetch_draft(name)
    config, weights = read_draft(path)
    draft = build_draft(config, weights, path)
    if draft.config.version != 1:
        raise ValueError(f"{path} is a DFlash 2 draft; only DFlash 1 drafts can be trained")
    if draft.config.quantization:
        draft = unpacked(draft)
    config = {key: value for key, value in config.items() if key not in ("quantization", "quantization_config")}
    return StartingDraft(config, _floats(draft), f"the draft {name}")


def _new(options: FitOptions, source: Source) -> StartingDraft:
    mask = unused_token(source.counts, source.tokenizer)
    size = SIZES[options.size or "small"]
    config = draft_config(source.structure, getattr(source.model, "args", None), size, mask)
    if options.block_size is not None:
        config = _with(config, block_size=options.block_size)
    draft = DraftModel(DraftConfig.from_dict(config))
    layers = initialize(draft, source.structure, options.seed)
    told = ", ".join("random" if i is None else str(i) for i in layers)
    return StartingDraft(config, _floats(draft), f"target layers {told}")


def _reduced(draft: StartingDraft, source: Source, count: int) -> StartingDraft:
    """The draft with a head of the `count` most frequent tokens."""
    if "d2t" in draft.weights or "lm_head.weight" in draft.weights:
        raise ValueError("--draft-vocab needs a draft that borrows the target's whole head")
    ids = source.frequent(count)
    d2t = mx.array((ids - np.arange(len(ids))).astype(np.int32))
    return replace(draft, config=_with(draft.config, draft_vocab_size=len(ids)), weights=draft.weights | {"d2t": d2t})


def _with(config: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """A config.json with other values, also where nested ones would win."""
    nested = {key: value for key, value in config["dflash_config"].items() if key not in changes}
    return {**config, **changes, "dflash_config": nested}


def _floats(draft: DraftModel) -> dict[str, mx.array]:
    """The weights of a draft, in float32 where they are floating."""
    return {
        k: v.astype(mx.float32) if mx.issubdtype(v.dtype, mx.floating) else v
        for k, v in tree_flatten(draft.parameters())
    }
