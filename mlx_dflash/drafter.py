"""The draft of one sequence: the network, its context caches, and how a proposal is taken from its logits.

Knows the draft model and the dice; receives the target's embedding and head as callables, knows nothing else of
targets or rounds.
"""

from collections.abc import Callable

import mlx.core as mx

from .block_size import rows_of
from .dice import Dice
from .draft.model import ContextCache, DraftModel
from .draft.selector import best

# Rows that a pause collects: enough to read the projections' weights seldom, few enough to catch up at once.
_MOST_WAITING = 16


class Drafter:
    """Proposes blocks for one sequence.

    embed: (1, L) token ids to (1, L, H) target embeddings. unembed: (1, L, H) to (1, L, V) target logits, or to
    (1, L, Vd) of the draft's tokens only. Both give way to the draft's own where it has them. block_size: anchor and
    drafts, at most what the draft was trained with.
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
        self.draft, self.dice = draft, dice
        self.caches = draft.make_cache() if caches is None else caches
        self.num_drafts = rows_of(block_size, draft.config.num_drafts) - 1
        self._table = draft.get("embed_tokens", embed)
        self._head, self._token_ids = _head(draft, unembed), draft.token_ids
        mask = draft.get("mask_embedding")
        mask = self._table(mx.array([[draft.config.mask_token_id]])) if mask is None else mask.reshape(1, 1, -1)
        self._mask_row = mask * draft.config.input_embedding_scale
        self._num_idle = 0  # proposals of no drafts, one after the other
        self._waiting: list[mx.array] = []  # features of committed tokens that the context caches do not cover yet

    @property
    def context_length(self) -> int:
        """Number of committed tokens whose K/V the context caches cover, or will cover when they are read."""
        return self._num_covered + self._num_waiting

    @property
    def _num_covered(self) -> int:
        return min(cache.offset for cache in self.caches)

    @property
    def _is_paused(self) -> bool:
        # The first proposal of no drafts belongs to the prompt's last token, with which the context covers the prompt.
        return self._num_idle > 1

    @property
    def _num_waiting(self) -> int:
        return sum(features.shape[1] for features in self._waiting)

    def reserve(self, tokens: int) -> None:
        """Make room for a context of this many tokens at the next growth."""
        for cache in self.caches:
            cache.reserve(tokens)

    def extend_context(self, features: mx.array) -> None:
        """Append committed tokens. features: (1, S, T * D), the target's tap outputs for them."""
        self._waiting.append(features)
        is_chunk = features.shape[1] > self.num_drafts + 1
        if is_chunk or self._is_paused and self._num_waiting >= _MOST_WAITING:
            # Pending, a chunk of a prompt would hold its features until the last one is read, a pause until it ends.
            self.settle()
        elif not self._is_paused:
            self._catch_up()

    def settle(self) -> None:
        """Let the context caches cover all committed tokens, and evaluate them."""
        self._catch_up()
        mx.eval([cache.keys for cache in self.caches], [cache.values for cache in self.caches])

    def _catch_up(self) -> None:
        if self._num_waiting:
            self.draft.project_context(mx.concatenate(self._waiting, axis=1), self.caches)
        self._waiting = []

    def can_rewind(self, length: int) -> bool:
        """Whether the context can go back to covering the first `length` tokens only."""
        return all(cache.offset - length <= cache.max_trim() for cache in self.caches)

    def rewind(self, length: int) -> None:
        """Go back to a context of the first `length` tokens."""
        covered = min(length, self._num_covered)
        if self._waiting:
            self._waiting = [mx.concatenate(self._waiting, axis=1)[:, : length - covered]]
        for cache in self.caches:
            rows = cache.offset - covered
            trimmed = cache.trim(rows)
            assert trimmed == rows, f"context cache gave back {trimmed} of {rows} rows"

    def draft_logits(self, anchor: int | mx.array, num_drafts: int | None = None) -> mx.array:
        """Return the draft's logits for the γ = num_drafts tokens after the anchor, which stays uncommitted.

        (γ, V), or (γ, Vd) over the rows of a reduced head; in DFlash 2 before the selector.
        """
        return self.logits_of(self._hidden(mx.array(anchor), self.num_drafts if num_drafts is None else num_drafts))[0]

    def propose(self, anchor: int | mx.array, num_drafts: int) -> mx.array:
        """Return up to num_drafts draft tokens (γ,) uint32 that may follow the anchor; the context stays as it is."""
        num_drafts = min(num_drafts, self.num_drafts)
        self._num_idle = 0 if num_drafts else self._num_idle + 1
        if num_drafts == 0:
            return mx.zeros((0,), mx.uint32)
        config, anchor = self.draft.config, mx.array(anchor)
        hidden = self._hidden(anchor, num_drafts)
        logits = self.logits_of(hidden)[0]
        if config.selector_top_k is None:  # DFlash 1 has no selector
            return self.dice.guess(logits, self._token_ids, config.vocab_size)
        scores, columns = best(logits, config.selector_top_k)
        ids = columns if self._token_ids is None else self._token_ids[columns]
        with self.dice.guessing(config.vocab_size) as choose:
            return self.draft.candidate_selector.walk(hidden[0], (scores, ids), anchor.reshape(1), choose)

    def _hidden(self, anchor: mx.array, num_drafts: int) -> mx.array:
        """(1, γ, H), the rows of a block from which the drafts are read."""
        self._catch_up()
        return self.drafting_rows(self.draft(self.embed_blocks(anchor.reshape(1), num_drafts), self.caches))

    def embed_blocks(self, anchors: mx.array, num_drafts: int) -> mx.array:
        """Return the embeddings (A, L, H) of the blocks [anchor, mask, ...] of anchors (A,), γ drafts each."""
        config, A = self.draft.config, anchors.size
        num_masks = num_drafts - config.sample_from_anchor
        first = self._table(anchors[:, None]) * config.input_embedding_scale
        masks = mx.broadcast_to(self._mask_row, (A, num_masks, self._mask_row.shape[-1]))
        return mx.concatenate([first, masks.astype(first.dtype)], axis=1)

    def drafting_rows(self, hidden: mx.array) -> mx.array:
        """Return the rows (A, γ, H) of blocks (A, L, H) from which drafts are read."""
        # Row 0 is the anchor; most drafts were trained to predict only the masked slots.
        return hidden if self.draft.config.sample_from_anchor else hidden[:, 1:]

    def logits_of(self, hidden: mx.array) -> mx.array:
        """Return the logits (A, γ, V), or (A, γ, Vd) of a reduced head, of drafting rows (A, γ, H)."""
        config = self.draft.config
        logits = self._head(hidden)[..., : config.vocab_size]
        if config.output_multiplier != 1.0:
            logits = logits * config.output_multiplier
        cap = config.final_logit_softcapping
        return logits if cap is None else mx.tanh(logits / cap) * cap


def _head(draft: DraftModel, unembed: Callable[[mx.array], mx.array]) -> Callable[[mx.array], mx.array]:
    """Return the draft's own head, or the target's, reduced to the draft's tokens where it has fewer."""
    ids = draft.token_ids
    if "lm_head" in draft or ids is None:
        return draft.get("lm_head", unembed)

    def reduced(hidden: mx.array) -> mx.array:
        logits = unembed(hidden)
        return logits if logits.shape[-1] == ids.size else logits[..., ids]

    return reduced
