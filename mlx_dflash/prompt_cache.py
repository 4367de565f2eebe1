"""Prompt caches of a target and its draft: one list, the target's entries first, then the draft's context caches.

The files are mlx-lm's: a saved cache of a target alone is read by mlx-lm, and mlx-lm's by us.
"""

from typing import Any

import mlx.nn as nn
from mlx_lm.models import cache as mlx_lm_cache

from . import rollback
from .cache import GrowingKVCache, WindowedKVCache
from .draft.model import DraftModel

load_prompt_cache = mlx_lm_cache.load_prompt_cache
_STOCK = {GrowingKVCache: mlx_lm_cache.KVCache, WindowedKVCache: mlx_lm_cache.RotatingKVCache}


def make_prompt_cache(model: nn.Module, draft_model: DraftModel | None = None, max_kv_size: int | None = None) -> list[Any]:
    """Return empty caches for a target and, behind them, for its draft.

    max_kv_size: as in mlx-lm; not supported together with a draft (ValueError).
    """
    if draft_model is None:
        return mlx_lm_cache.make_prompt_cache(model, max_kv_size)
    if not isinstance(draft_model, DraftModel):
        raise TypeError(f"draft_model must be a DFlash draft from load_draft, got {type(draft_model).__name__}")
    if max_kv_size is not None:
        raise ValueError("max_kv_size is not supported together with a draft")
    return [*mlx_lm_cache.make_prompt_cache(model), *draft_model.make_cache()]


def split_prompt_cache(prompt_cache: list[Any], model: nn.Module, draft: DraftModel) -> tuple[list[Any], list[Any]]:
    """Return the target's and the draft's entries. An empty cache of the target alone gets the draft's, in place.

    Raises ValueError if the list has not one entry a layer, or if the draft's entries do not cover the same tokens.
    """
    num_target, num_draft = len(mlx_lm_cache.make_prompt_cache(model)), draft.config.num_layers
    if len(prompt_cache) == num_target and all(c.empty() for c in prompt_cache):
        prompt_cache += draft.make_cache()
    if len(prompt_cache) != num_target + num_draft:
        raise ValueError(
            f"prompt_cache has {len(prompt_cache)} entries; expected {num_target} of the target and {num_draft} of the draft. "
            "A cache that was filled without the draft has no context for it: start with make_prompt_cache(model, draft_model)"
        )
    contexts = prompt_cache[num_target:]
    rollback.adopt(contexts, slack=2 * draft.config.block_size)
    prompt_cache[num_target:] = contexts
    covered = set(rollback.lengths(contexts)) | set(rollback.lengths(prompt_cache[:num_target]))
    if len(covered) > 1:
        raise ValueError(f"the caches cover {sorted(covered)} tokens; expected the same number in the target's and the draft's")
    return prompt_cache[:num_target], contexts


def save_prompt_cache(file_name: str, cache: list[Any], metadata: dict[str, str] | None = None) -> None:
    """Save a prompt cache, with or without draft entries, to a .safetensors file. metadata: text by name."""
    stock = [_STOCK[type(c)].from_state(c.state) if type(c) in _STOCK else c for c in cache]
    mlx_lm_cache.save_prompt_cache(file_name, stock, metadata)
