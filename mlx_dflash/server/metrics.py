"""Counters of a server, and the page of Prometheus text that shows them. Knows numbers only."""

import threading
from collections import Counter

from ..stats import Stats

_PREFIX = "mlx_dflash_"
_HELP = {
    "requests_total": "requests by HTTP status",
    "clients_gone_total": "answers that were given up because the client left",
    "prompt_tokens_total": "prompt tokens",
    "cached_prompt_tokens_total": "prompt tokens that a cache covered",
    "completion_tokens_total": "tokens generated",
    "generation_seconds_total": "seconds between first and last token",
    "prefill_seconds_total": "seconds up to the first token",
    "rounds_total": "rounds: one pass of the target each",
    "drafted_tokens_total": "tokens drafted",
    "accepted_tokens_total": "drafted tokens that the target kept",
    "rounds_by_kept_drafts_total": "rounds by the number of drafts that were kept",
    "acceptance_length": "mean tokens a round, of all rounds",
    "tokens_per_second": "tokens per second, of all answers",
    "requests_waiting": "requests that wait or are being answered",
    "prompt_cache_sequences": "sequences in the prompt cache",
    "prompt_cache_bytes": "bytes of the prompt cache",
    "active_memory_bytes": "bytes of arrays in use",
    "peak_memory_bytes": "most bytes of arrays in use at a time",
}


class Metrics:
    """Counters that several threads may add to."""

    def __init__(self):
        self._lock = threading.Lock()
        self._values: Counter = Counter()  # by (name, label)

    def add(self, name: str, value: float = 1, label: str = "") -> None:
        """Add to a counter. label: what the counter is broken down by, as name="value"."""
        with self._lock:
            self._values[name, label] += value

    def count_answer(
        self, prompt_tokens: int, cached_tokens: int, completion_tokens: int, stats: Stats | None, seconds: float
    ) -> None:
        """Add an answer that is finished or given up. seconds: from its first token to its last."""
        self.add("prompt_tokens_total", prompt_tokens)
        self.add("cached_prompt_tokens_total", cached_tokens)
        self.add("completion_tokens_total", completion_tokens)
        self.add("generation_seconds_total", seconds)
        if stats is not None:
            self.add("prefill_seconds_total", stats.prefill_seconds)
            self.add("rounds_total", stats.num_rounds)
            self.add("drafted_tokens_total", stats.num_drafted)
            self.add("accepted_tokens_total", stats.num_accepted)
            for kept, count in enumerate(stats.accepted):
                self.add("rounds_by_kept_drafts_total", count, f'kept="{kept}"')

    def page(self, **gauges: float) -> str:
        """Return the page. gauges: what is measured now, by name."""
        with self._lock:
            values = dict(self._values)
        rounds, seconds = values.get(("rounds_total", ""), 0), values.get(("generation_seconds_total", ""), 0)
        gauges["acceptance_length"] = 1 + values.get(("accepted_tokens_total", ""), 0) / rounds if rounds else 0
        gauges["tokens_per_second"] = values.get(("completion_tokens_total", ""), 0) / seconds if seconds else 0
        values |= {(name, ""): value for name, value in gauges.items()}
        lines = []
        for name, text in _HELP.items():
            found = sorted((label, value) for (n, label), value in values.items() if n == name)
            if not found and name.endswith("_total"):
                found = [("", 0)]
            if found:
                lines += [
                    f"# HELP {_PREFIX}{name} {text}",
                    f"# TYPE {_PREFIX}{name} {'counter' if name.endswith('_total') else 'gauge'}",
                ]
                lines += [f"{_PREFIX}{name}{'{' + label + '}' if label else ''} {value:.10g}" for label, value in found]
        return "\n".join(lines) + "\n"
