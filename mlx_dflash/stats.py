"""Counts of the rounds of one run, and where their time went.

The clock stands around the drafter and the dice, which is where a round waits for the device, never inside the round.
Knows numbers and a clock; knows nothing of what the rounds decide.
"""

import time
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from .dice import Dice, Roll

_TIMED_EVERY = 8  # rounds


@dataclass
class Stats:
    """Counts and times of one run.

    accepted[n] counts the rounds that kept n drafts. The prompt's pass, whose answer starts the text, is not counted
    as a round: prefill_seconds ends with the first token. round_seconds sums the rounds; host_seconds excludes the
    time spent waiting for the device. The waits for the draft and for the target are measured apart in every eighth
    round, which waits for its draft, and scaled to all rounds. draft_wait and verify_wait: seconds of the latest ones.
    """

    num_drafted: int = 0
    accepted: list[int] = field(default_factory=list)
    prefill_seconds: float = 0.0
    round_seconds: float = 0.0
    host_seconds: float = 0.0
    timed_draft_seconds: float = 0.0
    timed_verify_seconds: float = 0.0
    draft_wait: float = 0.0
    verify_wait: float = 0.0

    @property
    def num_rounds(self) -> int:
        return sum(self.accepted)

    @property
    def num_accepted(self) -> int:
        return sum(n * count for n, count in enumerate(self.accepted))

    @property
    def acceptance_length(self) -> float:
        """Mean tokens a round, the target's own included; 0 before the first round."""
        return 1 + self.num_accepted / self.num_rounds if self.num_rounds else 0.0

    @property
    def acceptance_rate(self) -> float:
        """Kept drafts per draft."""
        return self.num_accepted / self.num_drafted if self.num_drafted else 0.0

    @property
    def draft_seconds(self) -> float:
        return self._share(self.timed_draft_seconds)

    @property
    def verify_seconds(self) -> float:
        return self._share(self.timed_verify_seconds)

    def _share(self, part: float) -> float:
        whole = self.timed_draft_seconds + self.timed_verify_seconds
        return (self.round_seconds - self.host_seconds) * part / whole if whole else 0.0

    def as_dict(self) -> dict:
        """The numbers by name, ready for JSON; times in milliseconds."""
        return {
            "rounds": self.num_rounds,
            "drafted": self.num_drafted,
            "accepted": self.num_accepted,
            "acceptance_length": round(self.acceptance_length, 3),
            "acceptance_rate": round(self.acceptance_rate, 3),
            "histogram": list(self.accepted),
            "prefill_ms": round(1e3 * self.prefill_seconds, 2),
            "draft_ms": round(1e3 * self.draft_seconds, 2),
            "verify_ms": round(1e3 * self.verify_seconds, 2),
            "host_ms": round(1e3 * self.host_seconds, 2),
        }

    @property
    def is_timed(self) -> bool:
        """Whether the present round tells apart its waits for the draft and for the target."""
        return self.num_rounds % _TIMED_EVERY == 0

    def count(self, num_drafts: int, num_accepted: int, seconds: float = 0.0) -> None:
        """Count a round that drafted num_drafts tokens and kept num_accepted. seconds: 0 if it was not timed."""
        self.num_drafted += num_drafts
        self.accepted += [0] * (num_accepted + 1 - len(self.accepted))
        if self.is_timed:
            self.timed_draft_seconds += self.draft_wait
            self.timed_verify_seconds += self.verify_wait
        self.round_seconds += seconds
        self.host_seconds += seconds - self.draft_wait - self.verify_wait
        self.accepted[num_accepted] += 1


class TimedDrafter:
    """A drafter whose proposals are waited for, and timed into the statistics, in every eighth round."""

    def __init__(self, drafter: Any, stats: Stats):
        self._drafter, self._stats = drafter, stats

    def __getattr__(self, name: str) -> Any:
        return getattr(self._drafter, name)

    def propose(self, anchor: int, num_drafts: int) -> mx.array:
        """Return the drafter's proposal (γ,)."""
        drafts = self._drafter.propose(anchor, num_drafts)
        self._stats.draft_wait = 0.0
        if self._stats.is_timed:
            began = time.perf_counter()
            mx.eval(drafts)
            self._stats.draft_wait = time.perf_counter() - began
        return drafts


class TimedDice(Dice):
    """Dice whose rolls, which wait for the target, are timed into the statistics. The others are arguments of Dice."""

    def __init__(self, stats: Stats, *args: Any):
        super().__init__(*args)
        self._stats = stats

    def roll(self, logits: mx.array, drafts: mx.array, at: int = 0) -> Roll:
        """Return the roll of the dice."""
        began = time.perf_counter()
        rolled = super().roll(logits, drafts, at)
        self._stats.verify_wait = time.perf_counter() - began
        return rolled
