"""A draft's logits for many anchors of one sequence in one pass: what inference computes block by block.

Every block sees the context strictly before its anchor, and itself; no block sees another. Uses the draft's own modules
and differs from its inference only in where context and block K/V lie.
"""

import mlx.core as mx
import mlx.nn as nn

from ..draft.model import Attention, DraftLayer
from ..drafter import Drafter


def block_logits(
    drafter: Drafter, features: mx.array, anchors: mx.array, ids: mx.array, checkpointed: bool = False
) -> mx.array:
    """Return the draft's logits (A, γ, V) of the blocks that begin at the anchors of one sequence.

    features: (S, T * D), the context features of positions 0 to S - 1. anchors: (A,) positions. ids: (A,) their tokens.
    checkpointed: compute each layer again for its gradient instead of keeping what it needs.
    """
    draft = drafter.draft
    keys, values = draft.context_kv(features[None])  # (N, K, S, d) each
    x = drafter.embed_blocks(ids, drafter.num_drafts).astype(draft.dtype)  # (A, L, H)
    for i, layer in enumerate(draft.layers):

        def run(x: mx.array, keys: mx.array, values: mx.array, layer: DraftLayer = layer) -> mx.array:
            blocks = _Blocks(anchors, keys, values, draft._rope)
            return layer.around(x, lambda h: blocks.attend(layer.self_attn, h))

        x = (nn.utils.checkpoint(layer, run) if checkpointed else run)(x, keys[i], values[i])
    return drafter.logits_of(drafter.drafting_rows(draft.norm(x)))


class _Blocks:
    """Attention of blocks at anchors (A,) over context keys and values (K, S, d) and over themselves."""

    def __init__(self, anchors: mx.array, keys: mx.array, values: mx.array, rope: nn.Module):
        self.anchors, self.keys, self.values, self.rope = anchors, keys, values, rope

    def attend(self, attention: Attention, x: mx.array) -> mx.array:
        """x: (A, L, H), normed. Returns (A, L, H)."""
        A, L, _ = x.shape
        K, S, d = self.keys.shape
        queries, keys, values = attention.project(x, self.rope, self.anchors)  # (A, heads, L, d) each
        G = attention.num_heads // K
        queries = queries.reshape(A, K, G * L, d) * d**-0.5
        to_context = queries.transpose(1, 0, 2, 3).reshape(K, A * G * L, d) @ self.keys.swapaxes(-1, -2)
        to_context = to_context.reshape(K, A, G, L, S).transpose(1, 0, 2, 3, 4)
        to_block = (queries @ keys.swapaxes(-1, -2)).reshape(A, K, G, L, L)
        scores = mx.concatenate([to_context, to_block], axis=-1)
        scores = mx.where(self._mask(attention, L)[:, None, None], scores, mx.finfo(scores.dtype).min)
        sinks = attention.get("attention_sink_bias")
        if sinks is not None:
            column = mx.broadcast_to(sinks.reshape(1, K, G, 1, 1), (A, K, G, L, 1)).astype(scores.dtype)
            scores = mx.concatenate([column, scores], axis=-1)
        weights = mx.softmax(scores, axis=-1, precise=True)[..., scores.shape[-1] - S - L :]
        of_context = weights[..., :S].transpose(1, 0, 2, 3, 4).reshape(K, A * G * L, S) @ self.values
        of_context = of_context.reshape(K, A, G * L, d).transpose(1, 0, 2, 3)
        of_block = weights[..., S:].reshape(A, K, G * L, L) @ values
        out = (of_context + of_block).reshape(A, K * G, L, d).transpose(0, 2, 1, 3).reshape(A, L, -1)
        return attention.o_proj(out)

    def _mask(self, attention: Attention, L: int) -> mx.array:
        """(A, L, S + L): which context positions and which rows of its block each row sees."""
        S, A, sight = self.keys.shape[1], self.anchors.size, attention.sight
        context = mx.arange(S)[None, None] < self.anchors[:, None, None]
        context = mx.broadcast_to(context, (A, L, S))
        rows = mx.arange(L)
        block = rows[None] <= rows[:, None] if sight.causal else mx.ones((L, L), mx.bool_)
        if sight.window:
            positions = self.anchors[:, None] + rows  # (A, L)
            context = context & (positions[..., None] - mx.arange(S) < sight.window)
            block = block & (mx.abs(rows[:, None] - rows) < sight.window)
        return mx.concatenate([context, mx.broadcast_to(block, (A, L, L))], axis=-1)
