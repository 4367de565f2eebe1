"""What happened in the rounds of one run, and where their time went. Knows numbers and a clock only."""

import time
from dataclasses import dataclass, field

import mlx.core as mx

_TIMED_EVERY = 8  # rounds


@dataclass
class Stats:
    """Counts and times of one run.

    accepted[n] counts the rounds that kept n drafts; the prompt's own pass, whose answer starts the text, is none of
    them. prefill_seconds ends with the first token. round_seconds sums the rounds; host_seconds is the part of them
    in which nobody waited for the device, waiting for the draft and for the target is the rest. These two are told
    apart in every eighth round, which waits for its draft, and scaled to all rounds.
    """

    num_drafted: int = 0
    accepted: list[int] = field(default_factory=list)
    prefill_seconds: float = 0.0
    round_seconds: float = 0.0
    host_seconds: float = 0.0
    timed_draft_seconds: float = 0.0
    timed_verify_seconds: float = 0.0

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

    def count(self, num_drafts: int, num_accepted: int) -> None:
        """Count a round that drafted num_drafts tokens and kept num_accepted of them."""
        self.num_drafted += num_drafts
        self.accepted += [0] * (num_accepted + 1 - len(self.accepted))
        self.accepted[num_accepted] += 1


class RoundClock:
    """Times one round into the statistics: drafted, verifying, rolled and done are called in this order."""

    def __init__(self, stats: Stats):
        self._stats = stats
        self._is_timed = stats.num_rounds % _TIMED_EVERY == 0
        self._started = time.perf_counter()
        self._draft_wait = 0.0

    def drafted(self, drafts: mx.array) -> None:
        if self._is_timed:
            began = time.perf_counter()
            mx.eval(drafts)
            self._draft_wait = time.perf_counter() - began

    def verifying(self) -> None:
        self._waits = time.perf_counter()

    def rolled(self) -> None:
        self._waited = time.perf_counter()

    def done(self, num_drafts: int, num_accepted: int) -> float:
        """End the round, which drafted num_drafts tokens and kept num_accepted of them; return its seconds."""
        stats, whole = self._stats, time.perf_counter() - self._started
        verify_wait = self._waited - self._waits
        if self._is_timed:
            stats.timed_draft_seconds += self._draft_wait
            stats.timed_verify_seconds += verify_wait
        stats.round_seconds += whole
        stats.host_seconds += whole - self._draft_wait - verify_wait
        stats.count(num_drafts, num_accepted)
        return whole

    def first(self) -> None:
        """End the prompt's own pass, which counts as prefill."""
        self._stats.prefill_seconds += time.perf_counter() - self._started
