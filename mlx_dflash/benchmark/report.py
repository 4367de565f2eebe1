"""The report of a benchmark: numbers of each arm, as a table for people and as JSON for programs.

Knows runs and what they were made with; knows nothing of how they were made.
"""

import argparse
import json
import statistics
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from ..commands.machine import this_machine
from .measure import PLAIN, Run, Turn
from .subject import Subject, one_or_all


class Spread(NamedTuple):
    """A median and the two quartiles."""

    middle: float
    low: float
    high: float


@dataclass(frozen=True)
class Rounds:
    """The rounds of a drafted arm: what they kept, and where their time went.

    histogram[n]: number of rounds that kept n drafts. acceptance_length: mean tokens a round. acceptance_rate: kept
    drafts per draft. kept_by_slot: for each slot, the share of its drafts that were kept where all earlier ones were.
    """

    acceptance_length: float
    histogram: list[int]
    acceptance_rate: float
    kept_by_slot: list[float]
    draft_ms_per_round: float
    verify_ms_per_round: float
    host_ms_per_round: float


@dataclass(frozen=True)
class ArmResult:
    """The numbers of one arm in one group of prompts.

    prefill_ms: median time up to the first token; the other times are of the later tokens. rounds: None for an arm
    without a draft. identical: number of runs with the tokens of plain mlx-lm, None if that did not run; speedup_wall
    and speedup_cpu: how many times as fast as its run on the same prompt, None for its own runs, too.
    """

    runs: int
    tokens: int
    prefill_ms: float
    wall_ms_per_token: Spread
    cpu_ms_per_token: Spread
    tokens_per_second: float
    peak_gb: float
    rounds: Rounds | None = None
    identical: int | None = None
    speedup_wall: Spread | None = None
    speedup_cpu: Spread | None = None


# By the arm's name; None where no run had a token to time.
Results = dict[str, ArmResult | None]


@dataclass(frozen=True)
class Report:
    """All that a benchmark found. differences: see measure.differences, None if plain mlx-lm did not run."""

    setup: dict[str, Any]
    groups: dict[str, Results]
    everything: Results
    differences: list[dict[str, Any]] | None = None

    def as_json(self) -> dict[str, Any]:
        """Return the report as JSON has it: what is None is left out, and an arm's numbers are all on one level."""
        groups = {group: _json(results) for group, results in self.groups.items()}
        told = {"setup": self.setup, "groups": groups, "all": _json(self.everything)}
        return told if self.differences is None else told | {"differences": self.differences}


def _json(results: Results) -> dict[str, dict[str, Any]]:
    told = {}
    for name, result in results.items():
        numbers: dict[str, Any] = asdict(result) if result else {"runs": 0}
        numbers |= numbers.pop("rounds", None) or {}
        told[name] = {key: value for key, value in numbers.items() if value is not None}
    return told


def summarize(turns: list[Turn]) -> tuple[dict[str, Results], Results]:
    """Return the results of all arms in each group of prompts, and in all groups together."""
    groups: dict[str, list[Turn]] = {}
    for turn in turns:
        groups.setdefault(turn.case.group, []).append(turn)

    def results(some: list[Turn]) -> Results:
        return {name: summarize_arm(name, some) for name in some[0].runs}

    return {group: results(some) for group, some in groups.items()}, results(turns)


def summarize_arm(name: str, turns: list[Turn]) -> ArmResult | None:
    """Summarize one arm in one group. Returns None if none of its texts had a second token, for which time is taken."""
    turns = [turn for turn in turns if turn.runs[name].num_timed]
    runs = [turn.runs[name] for turn in turns]
    if not runs:
        return None
    pairs = [(turn.runs[name], turn.runs[PLAIN]) for turn in turns if PLAIN in turn.runs]
    ratios = [(run, plain) for run, plain in pairs if name != PLAIN and plain.num_timed]
    return ArmResult(
        runs=len(runs),
        tokens=sum(len(run.tokens) for run in runs),
        prefill_ms=round(1e3 * statistics.median(run.prefill_seconds for run in runs), 2),
        wall_ms_per_token=_spread(1e3 * _wall(run) for run in runs),
        cpu_ms_per_token=_spread(1e3 * _cpu(run) for run in runs),
        tokens_per_second=round(sum(run.num_timed for run in runs) / sum(run.seconds for run in runs), 2),
        peak_gb=round(max(run.peak_gb for run in runs), 3),
        rounds=_summarize_rounds([run.stats for run in runs if run.stats is not None and run.stats.num_rounds]),
        identical=sum(run.tokens == plain.tokens for run, plain in pairs) if pairs else None,
        speedup_wall=_spread(_wall(plain) / _wall(run) for run, plain in ratios) if ratios else None,
        speedup_cpu=_spread(_cpu(plain) / _cpu(run) for run, plain in ratios) if ratios else None,
    )


def _wall(run: Run) -> float:
    """Seconds of a token."""
    return run.seconds / run.num_timed


def _cpu(run: Run) -> float:
    """CPU seconds of a token."""
    return run.cpu_seconds / run.num_timed


def _summarize_rounds(stats: list[Any]) -> Rounds | None:
    if not stats:
        return None
    num_rounds, num_accepted = sum(s.num_rounds for s in stats), sum(s.num_accepted for s in stats)
    histogram = [sum(sum(s.accepted[n : n + 1]) for s in stats) for n in range(max(len(s.accepted) for s in stats))]

    def ms_per_round(seconds: Iterator[float]) -> float:
        return round(1e3 * sum(seconds) / num_rounds, 2)

    return Rounds(
        acceptance_length=round(1 + num_accepted / num_rounds, 3),
        histogram=histogram,
        acceptance_rate=round(num_accepted / max(1, sum(s.num_drafted for s in stats)), 3),
        kept_by_slot=kept_by_slot(histogram),
        draft_ms_per_round=ms_per_round(s.draft_seconds for s in stats),
        verify_ms_per_round=ms_per_round(s.verify_seconds for s in stats),
        host_ms_per_round=ms_per_round(s.host_seconds for s in stats),
    )


def kept_by_slot(histogram: list[int]) -> list[float]:
    """Return, for each slot, the share of its drafts that were kept where all earlier ones were."""
    reached = [sum(histogram[slot:]) for slot in range(len(histogram))]
    return [round(kept / tried, 3) for tried, kept in zip(reached, reached[1:]) if tried]


def _spread(values: Iterable[float]) -> Spread:
    values = sorted(values)
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3
    return Spread(round(middle, 3), round(low, 3), round(high, 3))


def setup(args: argparse.Namespace, subject: Subject) -> dict[str, Any]:
    """Return what was measured, where, and how, for the report."""
    lengths = [len(case.ids) for case in subject.cases]
    machine = this_machine()
    return {
        **subject.name,
        "machine": machine.processor,
        "system": machine.platform,
        "device": machine.device,
        "mlx": machine.versions["mlx"],
        "mlx_lm": machine.versions["mlx-lm"],
        "draft_block_size": one_or_all([draft.config.block_size for draft in subject.drafts.values()]),
        "prompts": len(subject.cases),
        "prompt_tokens": [min(lengths), max(lengths)],
        **{name: getattr(args, name) for name in ("max_tokens", "temp", "seed", "repeat")},
    }


def table(report: Report) -> str:
    """Return the report as lines for people. Ratios are medians over pairs of runs, with quartiles."""
    group_width = max(12, *map(len, report.groups)) + 2
    arm_width = max(8, *map(len, report.everything)) + 2
    lines = [", ".join(f"{name} {value}" for name, value in report.setup.items()), ""]
    lines.append(
        f"{'group':<{group_width}}{'arm':<{arm_width}}{'tokens':>7}{'a round':>9}{'tok/s':>9}{'cpu ms/tok':>12}"
        f"{'peak GB':>9}   faster than {PLAIN} (wall; cpu)"
    )
    for group, results in [*report.groups.items(), ("all", report.everything)]:
        for name, result in results.items():
            if result:
                lines.append(f"{group:<{group_width}}{name:<{arm_width}}{_row(result)}")
    lines.append("")
    for name, result in report.everything.items():
        if result and result.rounds:
            shares = " ".join(f"{100 * share:.0f} %" for share in result.rounds.kept_by_slot)
            lines.append(f"{name}: drafts kept by slot, of those whose slot was reached: {shares or 'none'}")
    if report.differences is not None:
        lines += ["", f"Texts that differ from {PLAIN}'s: {len(report.differences)}"]
        lines += [json.dumps(difference) for difference in report.differences]
    return "\n".join(lines)


def _row(result: ArmResult) -> str:
    length = result.rounds.acceptance_length if result.rounds else ""
    ratios = [ratio for ratio in (result.speedup_wall, result.speedup_cpu) if ratio]
    return (
        f"{result.tokens:>7}{length:>9}{result.tokens_per_second:>9}{result.cpu_ms_per_token.middle:>12}"
        f"{result.peak_gb:>9}   " + "; ".join(f"{middle:.2f} ({low:.2f} to {high:.2f})" for middle, low, high in ratios)
    )
