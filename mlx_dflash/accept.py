"""Acceptance of a drafted block: keep drafts while the target rolled the same token.

Works on token ids of one sequence; knows nothing of models or caches.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Verdict:
    """The verdict on a block: the kept drafts, the target's own token after them, and why the text ends, if it does.

    finish_reason: None, "stop" or "length".
    """

    kept: tuple[int, ...]
    next_token: int
    finish_reason: str | None = None

    @property
    def num_accepted(self) -> int:
        """Number of kept drafts, 0 to γ."""
        return len(self.kept)

    @property
    def tokens(self) -> tuple[int, ...]:
        """The tokens that this round adds to the text."""
        return *self.kept, self.next_token

    def cut(self, stop_tokens: Collection[int], limit: float) -> "Verdict":
        """End the verdict at the first stop token, or after `limit` tokens (>= 1), whichever comes first."""
        for i, token in enumerate(self.tokens):
            if token in stop_tokens:
                return Verdict(self.kept[:i], token, "stop")
            if i + 1 >= limit:
                return Verdict(self.kept[:i], token, "length")
        return self


def accept(drafts: Sequence[int], rolled: Sequence[int]) -> Verdict:
    """Keep the longest prefix of drafts that the target rolled too, and the target's token after it.

    drafts: γ ids, the proposal. rolled: the target's own token at each row, γ + 1 of them, or fewer if the last
    one differs from its draft. Raises ValueError if rolled ends before the answer is known.
    """
    n = 0
    while n < len(drafts) and n < len(rolled) and drafts[n] == rolled[n]:
        n += 1
    if n >= len(rolled):
        raise ValueError(
            f"{len(rolled)} rolled tokens do not decide {len(drafts)} drafts; expected one row more than was kept"
        )
    return Verdict(tuple(drafts[:n]), rolled[n])
