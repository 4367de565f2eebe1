"""One sequence: the prefill, and THE ROUND.

    drafts  = drafter.propose(anchor)                    a block of draft tokens, one draft pass
    scores  = target.verify(anchor, drafts)              logits and features of every row, one target pass
    rolled  = dice.roll(scores.logits, drafts)           the target's own token at each row
    verdict = accept(drafts, rolled).cut(stop, limit)    the longest agreed prefix, and the token after it
    target.commit(kept); drafter.extend_context(scores.features[:kept])
    anchor  = verdict.next_token

Between rounds, the caches of target and draft cover the prompt and every emitted token except the last, the anchor.
Tokens that a cache does not hold yet are kept at hand and added before its next use.
Knows tokens; knows nothing of text, of model families or of how a cache goes back. Source of the algorithm: DFlash,
block diffusion for flash speculative decoding (z-lab).
"""

import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import mlx.core as mx

from .accept import Verdict, accept
from .dice import Dice
from .host import read_id, read_ids
from .pace import Pace
from .stats import Stats
from .target import Target


@dataclass(frozen=True)
class Round:
    """A finished round: block [anchor, drafts], the verdict on it, and the log-probabilities (V,) of its tokens."""

    anchor: int
    drafts: list[int]
    verdict: Verdict
    logprobs: list[mx.array]


class Session:
    """Prefill and rounds of one sequence.

    stop_tokens: ids that end the text. max_tokens: most tokens to emit, -1 without limit. settles: whether the caches
    have to cover every emitted token at the end, which costs one target pass; for caches that live on. pace: decides
    how many drafts a round verifies; None takes as many as the drafter gives. stream: where the work is enqueued.
    stats: counts the rounds.
    """

    def __init__(
        self,
        target: Target,
        drafter: "Proposer",
        dice: Dice,
        *,
        stop_tokens: Collection[int] = (),
        max_tokens: int = -1,
        settles: bool = True,
        pace: Pace | None = None,
        stream: mx.Stream | mx.ThreadLocalStream | None = None,
        stats: Stats | None = None,
    ):
        self.target, self.drafter, self.dice = target, drafter, dice
        self.stop_tokens = stop_tokens
        self.max_tokens = max_tokens if max_tokens >= 0 else float("inf")
        self.settles, self.pace = settles, pace
        self.stream = stream or mx.default_stream(mx.default_device())
        self.stats = stats or Stats()
        self._anchor: int  # the last emitted token, once there is a prompt

    def round(self, num_drafts: int, limit: float) -> Round:
        """Draft a block, verify it in one target pass, keep what the target rolled too.

        num_drafts: most drafts of the block. limit: most tokens (>= 1) that the round may add to the text.
        """
        anchor, covered = self._anchor, self.target.length
        with self._all_or_nothing():
            drafts = self.drafter.propose(anchor, num_drafts)  # (γ,), one draft pass
            mx.async_eval(drafts)  # the device drafts while the verify is being put together
            scores = self.target.verify(anchor, drafts)  # logits (γ + 1, V), features; one target pass
            rolled = self.dice.roll(scores.logits, drafts, at=covered)  # the target's own tokens; the one host sync
            proposal = read_ids(drafts)
            verdict = accept(proposal, rolled.tokens).cut(self.stop_tokens, limit)
            keep = verdict.num_accepted + 1  # the anchor and the kept drafts
            self.target.commit(keep)
            self.drafter.extend_context(scores.features[:, :keep])
        self._anchor = verdict.next_token
        return Round(anchor, proposal, verdict, rolled.logprobs)

    def rounds(
        self,
        prompt: mx.array,
        step_size: int = 2048,
        progress: Callable[[int, int], None] = lambda processed, total: None,
    ) -> Iterator[Round]:
        """Run the prefill of prompt (P,) and then round after round until the text ends.

        The first round is the pass of the prompt's last token, which drafts nothing. progress gets the number of
        prompt tokens processed so far and their total. If the prefill fails, the caches cover what they did before,
        or, where they cannot go back so far, what was read.
        """
        self._anchor = read_id(prompt[-1])
        with mx.stream(self.stream):
            began = time.perf_counter()
            self.dice.begin(prompt, at=self.target.length + prompt.size - 1)
            self._prefill(prompt[:-1], step_size, lambda done: progress(done, prompt.size))
            latest = self.round(0, self.max_tokens)
            self.stats.prefill_seconds = time.perf_counter() - began
        progress(prompt.size, prompt.size)
        num_tokens = 1
        yield latest
        while latest.verdict.finish_reason is None:
            limit = self.max_tokens - num_tokens
            with mx.stream(self.stream):
                began = time.perf_counter()
                wanted = self.drafter.num_drafts if self.pace is None else self.pace.num_drafts
                latest = self.round(int(min(limit - 1, wanted)), limit)
                outcome = len(latest.drafts), latest.verdict.num_accepted, time.perf_counter() - began
                self.stats.count(*outcome)
                if self.pace is not None:
                    self.pace.learn(*outcome)
            num_tokens += len(latest.verdict.tokens)
            yield latest

    def read(self, tokens: mx.array, step_size: int, progress: Callable[[int], None]) -> None:
        """Commit tokens (T,), the beginning of a prompt. However that ends, both caches keep what was read.

        progress gets the number of tokens processed so far.
        """
        with mx.stream(self.stream):
            try:
                self.target.prefill(tokens, self.drafter.extend_context, step_size, progress)
            finally:
                length = min(self.target.length, self.drafter.context_length)
                self.target.rewind(length)
                self.drafter.rewind(length)
                self.drafter.settle()
                self.target.settle()

    def leave(self, covered: int, last: int) -> None:
        """Bring both caches to exactly `covered` tokens, the text as it was emitted. last: its last token."""
        try:
            if self.target.length > covered:
                self.target.rewind(covered)
                self.drafter.rewind(covered)
            elif self.settles and self.target.length == covered - 1:
                with self._all_or_nothing():
                    scores = self.target.verify(last, mx.zeros((0,), mx.uint32))
                    self.target.commit(1)
                    self.drafter.extend_context(scores.features)
        finally:
            if self.settles:
                # What is pending could only be computed in this thread.
                self.drafter.settle()
                self.target.settle()

    def _prefill(self, tokens: mx.array, step_size: int, progress: Callable[[int], None]) -> None:
        before = self.target.length
        try:
            progress(0)
            self.target.prefill(tokens, self.drafter.extend_context, step_size, progress)
        except BaseException:
            can_restart = self.target.can_rewind(before) and self.drafter.can_rewind(before)
            length = before if can_restart else min(self.target.length, self.drafter.context_length)
            self.target.rewind(length)
            self.drafter.rewind(length)
            raise

    @contextmanager
    def _all_or_nothing(self) -> Iterator[None]:
        """If the body raises, return both caches to the length that they had on entry."""
        before = self.target.length
        try:
            yield
        except BaseException:
            if self.target.length > before:
                self.target.rewind(before)
            self.drafter.rewind(before)
            raise


class Proposer(Protocol):
    """A drafter, as far as the round needs one."""

    num_drafts: int  # most drafts of a proposal

    @property
    def context_length(self) -> int:
        """Number of committed tokens that the next proposal sees."""

    def extend_context(self, features: mx.array) -> None:
        """Append committed tokens. features: (1, S, T * D), the target's tap outputs for them."""

    def can_rewind(self, length: int) -> bool:
        """Say whether the context can go back to the first `length` tokens."""

    def rewind(self, length: int) -> None:
        """Go back to a context of the first `length` tokens."""

    def propose(self, anchor: int, num_drafts: int) -> mx.array:
        """Return at most num_drafts draft tokens (γ,) that may follow the anchor."""

    def settle(self) -> None:
        """Evaluate what is pending."""
