"""One sequence: the prefill, and THE ROUND.

    draft -> verify -> accept -> commit

Between rounds, the target's caches and the draft's context caches cover exactly the prompt and every emitted token
but the last, the anchor; or what they lack is at hand for when they are next read. Knows tokens; knows nothing of
text, of model families or of how a cache rolls back.
"""

import sys
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import mlx.core as mx

from .accept import Verdict, accept
from .dice import Dice
from .pace import Pace
from .stats import RoundClock, Stats
from .target import Target

_CLEAR_EVERY = 256  # tokens, as mlx-lm does


class Proposer(Protocol):
    """What the round needs of a drafter."""

    num_drafts: int  # most drafts of a proposal

    @property
    def context_length(self) -> int: ...

    def extend_context(self, features: mx.array) -> None: ...

    def can_rewind(self, length: int) -> bool: ...

    def rewind(self, length: int) -> None: ...

    def propose(self, anchor: int, num_drafts: int) -> mx.array: ...

    def settle(self) -> None: ...


@dataclass(frozen=True)
class Emission:
    """One token of the text. logprobs: (V,), of the target. finish_reason: None, "stop" or "length"."""

    token: int
    logprobs: mx.array
    from_draft: bool
    finish_reason: str | None


@dataclass(frozen=True)
class Round:
    """A finished round: block [anchor, drafts], the verdict on it, and the log-probabilities (V,) of its tokens."""

    anchor: int
    drafts: list[int]
    verdict: Verdict
    logprobs: list[mx.array]


class Session:
    """Prefill and rounds of one sequence.

    stop_tokens: ids that end the text. max_tokens: most tokens to emit, -1 without limit. settles: whether the
    caches shall cover every emitted token at the end, which costs one target pass; for caches that live on.
    pace: says how many drafts a round verifies; None for as many as the drafter gives. stream: where the work is
    enqueued.
    """

    def __init__(
        self,
        target: Target,
        drafter: Proposer,
        dice: Dice,
        *,
        stop_tokens: Collection[int] = (),
        max_tokens: int = -1,
        settles: bool = True,
        pace: Pace | None = None,
        stream: mx.Stream | mx.ThreadLocalStream | None = None,
    ):
        self.target, self.drafter, self.dice = target, drafter, dice
        self.stop_tokens = stop_tokens
        self.max_tokens = max_tokens if max_tokens >= 0 else float("inf")
        self.settles, self.pace = settles, pace
        self.stream = stream or mx.default_stream(mx.default_device())
        self.stats = Stats()
        self._confirmed = 0  # tokens that the caches covered before the block that was rolled latest

    def emit(self, prompt: mx.array, **prefill) -> Iterator[Emission]:
        """Emit the target's tokens after prompt (P,), one by one. prefill: see rounds.

        However the iteration ends, the caches then cover the prompt and exactly the emitted tokens (see settles).
        """
        covered, last = self.target.length + prompt.size, prompt[-1].item()
        try:
            for latest in self.rounds(prompt, **prefill):
                verdict = latest.verdict
                for i, token in enumerate(verdict.tokens):
                    is_last = i == verdict.num_accepted
                    emission = Emission(
                        token, latest.logprobs[i], not is_last, verdict.finish_reason if is_last else None
                    )
                    covered, last = covered + 1, token
                    yield emission
                if covered // _CLEAR_EVERY > (covered - len(verdict.tokens)) // _CLEAR_EVERY:
                    mx.clear_cache()
        finally:
            # At the end of the process, whoever forgot to close this needs no caches, and MLX may be gone.
            if not sys.is_finalizing():
                with mx.stream(self.stream):
                    self._leave(covered, last)

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
        self._anchor = prompt[-1].item()
        self._confirmed = self.target.length + prompt.size - 1
        with mx.stream(self.stream):
            self.dice.begin(prompt)
            self._prefill(prompt[:-1], step_size, lambda done: progress(done, prompt.size))
            clock = RoundClock(self.stats)
            latest = self._round(clock, 0, self.max_tokens)
            clock.first()
        progress(prompt.size, prompt.size)
        num_tokens = 1
        yield latest
        while latest.verdict.finish_reason is None:
            limit = self.max_tokens - num_tokens
            with mx.stream(self.stream):
                clock = RoundClock(self.stats)
                wanted = self.drafter.num_drafts if self.pace is None else self.pace.num_drafts
                latest = self._round(clock, min(limit - 1, wanted), limit)
                counts = len(latest.drafts), latest.verdict.num_accepted
                seconds = clock.done(*counts)
                if self.pace is not None:
                    self.pace.learn(*counts, seconds)
            num_tokens += len(latest.verdict.tokens)
            yield latest

    def _prefill(self, tokens: mx.array, step_size: int, progress: Callable[[int], None]) -> None:
        started, before = time.perf_counter(), self.target.length
        try:
            progress(0)
            self.target.prefill(tokens, self.drafter.extend_context, step_size, progress)
        except BaseException:
            can_restart = self.target.can_rewind(before) and self.drafter.can_rewind(before)
            length = before if can_restart else min(self.target.length, self.drafter.context_length)
            self.target.rewind(length)
            self.drafter.rewind(length)
            raise
        self.stats.prefill_seconds = time.perf_counter() - started

    def _round(self, clock: RoundClock, num_drafts: int, limit: float) -> Round:
        """One round with at most num_drafts drafts, which adds at most limit tokens to the text."""
        anchor = self._anchor
        with self._all_or_nothing() as confirmed:
            drafts = self.drafter.propose(anchor, num_drafts)
            mx.async_eval(drafts)  # the device drafts while the verify is being put together
            clock.drafted(drafts)
            scores = self.target.verify(anchor, drafts)
            clock.verifying()
            rolled = self.dice.roll(scores.logits, drafts)
            self._confirmed = confirmed
            clock.rolled()
            proposal = drafts.tolist()
            verdict = accept(proposal, rolled.tokens).cut(self.stop_tokens, limit)
            self.target.commit(verdict.num_accepted + 1)
            self.drafter.extend_context(scores.features[:, : verdict.num_accepted + 1])
        self._anchor = verdict.next_token
        return Round(anchor, proposal, verdict, rolled.logprobs)

    @contextmanager
    def _all_or_nothing(self) -> Iterator[int]:
        """Take back what the caches have got inside the scope if it fails, wherever. Gives the length before."""
        before = self.target.length
        try:
            yield before
        except BaseException:
            if self.target.length > before:
                self.target.commit(0)
            self.drafter.rewind(before)
            raise

    def _leave(self, covered: int, last: int) -> None:
        """Let the caches cover this many tokens, the text as it was emitted, which ends with the token `last`."""
        self.dice.end(covered - self._confirmed - 1)
        try:
            if self.target.length > covered:
                self.target.commit(covered - self._confirmed)
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
