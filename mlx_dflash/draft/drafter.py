"""The draft of one sequence: the network, its context caches, and how a proposal is taken from its logits.

Knows the draft model and the dice; receives the target's embedding and head as callables, knows nothing else of
targets or rounds.
"""

from collections.abc import Callable

import mlx.core as mx

from ..dice import Dice
from .model import ContextCache, DraftModel


class Drafter:
    """Proposes blocks for one sequence.

    embed: (1, L) token ids to (1, L, H) target embeddings. unembed: (1, L, H) to (1, L, V) target logits.
    block_size: anchor + drafts, at most the block the draft was trained with.
    """

    def __init__(
        self,
        draft: DraftModel,
        embed: Callable[[mx.array], mx.array],
        unembed: Callable[[mx.array], mx.array],
        dice: Dice,
        caches: list[ContextCache] | None = None,
        block_size: int | None = None,
    ):
        trained = draft.config.block_size
        block_size = trained if block_size is None else block_size
        if not 1 <= block_size <= trained:
            raise ValueError(f"block_size must be 1 to {trained}, the block that the draft was trained with; got {block_size}")
        self.draft, self.unembed, self.dice = draft, unembed, dice
        self.caches = draft.make_cache() if caches is None else caches
        self.num_drafts = block_size - 1
        self._embed = embed
        mask = draft.get("mask_embedding")
        self._mask_row = embed(mx.array([[draft.config.mask_token_id]])) if mask is None else mask.reshape(1, 1, -1)

    @property
    def context_length(self) -> int:
        """Number of committed tokens whose K/V the context caches cover."""
        return self.caches[0].offset

    def reserve(self, tokens: int) -> None:
        """Make room for a context of this many tokens at the next growth."""
        for cache in self.caches:
            cache.reserve(tokens)

    def extend_context(self, features: mx.array) -> None:
        """Append committed tokens. features: (1, S, T * D), the target's tap outputs for them."""
        self.draft.project_context(features, self.caches)
        if features.shape[1] > self.num_drafts + 1:
            # A chunk of a prompt: pending, it would hold its features until the last chunk is read.
            mx.eval([cache.keys for cache in self.caches], [cache.values for cache in self.caches])

    def can_rewind(self, length: int) -> bool:
        """Whether the context can go back to covering the first `length` tokens only."""
        return all(cache.offset - length <= cache.max_trim() for cache in self.caches)

    def rewind(self, length: int) -> None:
        """Go back to a context of the first `length` tokens."""
        for cache in self.caches:
            rows = cache.offset - length
            trimmed = cache.trim(rows)
            assert trimmed == rows, f"context cache gave back {trimmed} of {rows} rows"

    def draft_logits(self, anchor: int | mx.array, num_drafts: int | None = None) -> mx.array:
        """Return the draft's logits (γ, V) for the γ = num_drafts tokens after the anchor, which stays uncommitted."""
        num_drafts = self.num_drafts if num_drafts is None else num_drafts
        anchor = mx.array(anchor).reshape(1, 1)
        masks = mx.broadcast_to(self._mask_row, (1, num_drafts, self._mask_row.shape[-1]))
        block = mx.concatenate([self._embed(anchor), masks.astype(self._mask_row.dtype)], axis=1)  # (1, γ + 1, H)
        # Row 0 is the anchor; the draft was trained to predict only the masked slots.
        hidden = self.draft(block, self.caches)[:, 1:]
        logits = self.unembed(hidden)[0, :, : self.draft.config.vocab_size]
        cap = self.draft.config.final_logit_softcapping
        return logits if cap is None else mx.tanh(logits / cap) * cap

    def propose(self, anchor: int | mx.array, num_drafts: int) -> mx.array:
        """Return up to num_drafts draft tokens (γ,) uint32 that may follow the anchor; the context stays as it is."""
        num_drafts = min(num_drafts, self.num_drafts)
        if num_drafts == 0:
            # Nothing reads the context in this round; without an evaluation its pending appends would pile up.
            mx.eval([cache.keys for cache in self.caches], [cache.values for cache in self.caches])
            return mx.zeros((0,), mx.uint32)
        return self.dice.guess(self.draft_logits(anchor, num_drafts))
