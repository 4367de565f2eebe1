"""A drafter that knows the text, so that a test chooses how many drafts each round keeps."""

import mlx.core as mx
import numpy as np


class OracleDrafter:
    """A drafter that knows the text and spoils its proposals so that each round accepts a chosen number.

    prompt, continuation: the tokens before, and those that the target emits. accepts: how many drafts each
    round keeps, an int for all rounds or a list that is repeated; None keeps all. inner: a real drafter,
    which then sees and computes everything, while its proposals are thrown away.
    """

    def __init__(self, prompt, continuation, accepts=None, num_drafts=5, inner=None):
        self.num_drafts = num_drafts
        self.context_length = 0
        self.proposals = []  # One (anchor, drafts) a proposal, for tests to look at.
        self._text = [*prompt, *continuation]
        self._accepts = [num_drafts] if accepts is None else np.atleast_1d(accepts).tolist()
        self._inner = inner

    def extend_context(self, features):
        """Count the committed rows of features (1, S, T*D)."""
        self.context_length += features.shape[1]
        if self._inner is not None:
            self._inner.extend_context(features)

    def can_rewind(self, length):
        return self._inner is None or self._inner.can_rewind(length)

    def rewind(self, length):
        """Go back to a context of the first `length` tokens."""
        self.context_length = length
        if self._inner is not None:
            self._inner.rewind(length)

    def settle(self):
        """Evaluate what is pending."""
        if self._inner is not None:
            self._inner.settle()

    def propose(self, anchor, num_drafts=None):
        """The text behind the anchor (γ,) uint32, wrong at the slot where this round shall end.

        Raises AssertionError if the anchor is not the token right behind the context.
        """
        num_drafts = self.num_drafts if num_drafts is None else min(num_drafts, self.num_drafts)
        anchor, at = int(anchor), self.context_length
        if self._inner is not None:
            self._inner.propose(anchor, num_drafts)
        if num_drafts == 0:
            return mx.zeros((0,), dtype=mx.uint32)
        expected = self._text[at] if at < len(self._text) else None
        if anchor != expected:
            raise AssertionError(
                f"anchor {anchor} behind {at} context rows, but the text has {expected} there: the context "
                "must cover every token but the last"
            )
        keep = self._accepts[len(self.proposals) % len(self._accepts)]
        known = self._text[at + 1 : at + 1 + num_drafts]
        drafts = known + [0] * (num_drafts - len(known))
        if keep < num_drafts:
            drafts[keep] = 1 if drafts[keep] == 0 else 0
        self.proposals.append((anchor, drafts))
        return mx.array(drafts, dtype=mx.uint32)
