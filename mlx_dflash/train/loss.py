"""The distance of a draft's logits from what the target said: the loss of the blocks of one sequence.

Per slot, cross-entropy with the token that stands there, mixed with cross-entropy against the target's own likeliest
tokens. A slot only helps if all before it were right, so its weight falls with its distance from the anchor.
Source: DFlash, block diffusion for flash speculative decoding (z-lab), for the decaying weights.
"""

from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from .lessons import Lesson


@dataclass(frozen=True)
class Weighting:
    """decay: slots in which the weight falls by a factor e. soft: share of the target's distribution, 0 to 1."""

    decay: float = 3.0
    soft: float = 0.5

    def __post_init__(self):
        if self.decay <= 0:
            raise ValueError(f"the decay of the slot weights must be above 0 slots, got {self.decay}")
        if not 0 <= self.soft <= 1:
            raise ValueError(f"the share of soft targets must be 0 to 1, got {self.soft}")

    def slots(self, num_drafts: int) -> np.ndarray:
        """(γ,) weights."""
        return np.exp(-np.arange(num_drafts) / self.decay).astype(np.float32)


class Columns:
    """The column of the logits of each token: its id, or its place in a reduced head. token_ids: (Vd,), or None."""

    def __init__(self, token_ids: np.ndarray | None, vocab_size: int):
        columns = np.arange(vocab_size) if token_ids is None else np.full(vocab_size, -1)
        if token_ids is not None:
            columns[token_ids] = np.arange(len(token_ids))
        self._columns = mx.array(columns.astype(np.int32))

    def of(self, ids: mx.array) -> tuple[mx.array, mx.array]:
        """Columns of ids (...) and whether they have one; those without get column 0."""
        columns = self._columns[ids]
        return mx.maximum(columns, 0), columns >= 0


def slot_weights(lesson: Lesson, anchors: mx.array, columns: Columns, slots: mx.array) -> mx.array:
    """(A, γ): the weight of each slot; 0 behind the end of the text, and for tokens that the head does not have."""
    places = _places(anchors, slots)
    inside = places < lesson.tokens.size
    _, known = columns.of(lesson.tokens[mx.minimum(places, lesson.tokens.size - 1)])
    return mx.where(inside & known, slots, 0.0)


def block_loss(
    logits: mx.array, lesson: Lesson, anchors: mx.array, columns: Columns, weights: tuple[mx.array, float]
) -> mx.array:
    """Return the weighted sum of the losses of all slots.

    logits: (A, γ, V). anchors: (A,) positions. weights: (A, γ) of slot_weights, and the share of soft targets.
    """
    slot, soft = weights
    places = mx.minimum(_places(anchors, slot[0]), lesson.tokens.size - 1)  # (A, γ)
    logits = logits.astype(mx.float32)
    total = mx.logsumexp(logits, axis=-1)
    column, _ = columns.of(lesson.tokens[places])
    loss = total - mx.take_along_axis(logits, column[..., None], axis=-1)[..., 0]
    if soft:
        column, known = columns.of(lesson.top_ids[places - 1])  # (A, γ, TOP), what the target said one row before
        chances = mx.where(known, lesson.top_logits[places - 1], -mx.inf)
        has_any = known.any(axis=-1)
        chances = mx.softmax(mx.where(has_any[..., None], chances, 0.0), axis=-1)
        likely = total - (chances * mx.take_along_axis(logits, column, axis=-1)).sum(axis=-1)
        loss = mx.where(has_any, (1 - soft) * loss + soft * likely, loss)
    return (slot * loss).sum()


def _places(anchors: mx.array, slots: mx.array) -> mx.array:
    """(A, γ) positions of the tokens that the slots propose."""
    return anchors[:, None] + 1 + mx.arange(slots.size)
