"""The candidate selector of DFlash 2: it scores how well one of the head's best tokens follows another.

The head scores every slot alone. The selector adds, for the best few candidates of a slot, how well each follows the
token that was chosen before it. It scores; the choice is the dice's.
"""

from collections.abc import Callable

import mlx.core as mx
import mlx.nn as nn


class CandidateSelector(nn.Module):
    """Scores of a slot's candidates after a predecessor.

    predecessor_codebook, successor_codebook: (V, r), one row for each token. hidden_projection: H -> r.
    """

    def __init__(self, hidden_size: int, vocab_size: int, rank: int, top_k: int):
        super().__init__()
        self.top_k = top_k
        self.predecessor_codebook = mx.zeros((vocab_size, rank))
        self.successor_codebook = mx.zeros((vocab_size, rank))
        self.hidden_projection = nn.Linear(hidden_size, rank, bias=False)

    def walk(
        self,
        hidden: mx.array,
        candidates: tuple[mx.array, mx.array],
        anchor: mx.array,
        choose: Callable[[mx.array, mx.array], mx.array],
    ) -> mx.array:
        """Choose a path of drafts (γ,) uint32 after the anchor (1,), slot by slot.

        hidden: (γ, H), rows after the final norm. candidates: (γ, K) logits and their token ids.
        choose: scores (1, K), ids (K,) -> the chosen id (1,).
        """
        unary, ids = candidates
        projected = self.hidden_projection(hidden)  # (γ, r)
        successors = self.successor_codebook[ids].swapaxes(1, 2)  # (γ, r, K)
        path = [anchor.astype(mx.uint32)]
        for i in range(len(ids)):
            edge = (self.predecessor_codebook[path[-1]] * projected[i]) @ successors[i]  # (1, K)
            path.append(choose(unary[i : i + 1] + edge, ids[i]))
        return mx.concatenate(path[1:])


def best(logits: mx.array, k: int) -> tuple[mx.array, mx.array]:
    """Return the k largest of each row of logits (γ, V), in no order: values (γ, k) and columns (γ, k)."""
    columns = mx.argpartition(logits, kth=-k, axis=-1)[:, -k:]
    return mx.take_along_axis(logits, columns, axis=-1), columns
