"""Run the arms of a benchmark: each a way to generate, all on the same prompts.

The arms of one prompt run directly after each other, in random order, so that the ratio of a pair of runs cancels what
else the machine does. Knows how to generate, and clocks; knows nothing of what a report says of the runs.
"""

import argparse
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx_lm

from ..api import stream_generate
from ..commands.sampling import sampler
from .subject import Case, Subject

PLAIN = "mlx-lm"  # the arm without a draft
_WARM_UP = 4  # tokens

# From prompt ids to a stream of responses.
Arm = Callable[[list[int]], Iterator[Any]]


@dataclass(frozen=True)
class Run:
    """One arm on one prompt. Times are of all tokens after the first, whose time is the prefill's."""

    tokens: list[int]
    prefill_seconds: float
    seconds: float
    cpu_seconds: float
    peak_gb: float
    stats: Any

    @property
    def num_timed(self) -> int:
        """Number of tokens that the times are of."""
        return len(self.tokens) - 1


@dataclass(frozen=True)
class Turn:
    """The runs of all arms on one prompt, one directly after the other. prompt: its number among the cases."""

    repeat: int
    prompt: int
    case: Case
    runs: dict[str, Run]


def make_arms(args: argparse.Namespace, subject: Subject) -> dict[str, Arm]:
    """Return the arms by name: each block size with each draft and, with --compare, plain mlx-lm as the last."""
    options = dict(
        max_tokens=args.max_tokens, sampler=sampler(subject.tokenizer, temp=args.temp) if args.temp else None
    )

    def drafted(draft: Any, block_size: int | str) -> Arm:
        return lambda ids: stream_generate(
            subject.model, subject.tokenizer, ids, draft_model=draft, block_size=block_size, **options
        )

    arms = {}
    for name, draft in subject.drafts.items():
        for block_size in args.block_size or [draft.config.block_size]:
            arms[_arm_name(args, subject, name, block_size)] = drafted(draft, block_size)
    if args.compare:
        if PLAIN in arms:
            raise ValueError(f"{PLAIN} is the name of the arm without a draft; give the draft's folder another name")
        arms[PLAIN] = lambda ids: mlx_lm.stream_generate(subject.model, subject.tokenizer, ids, **options)
    return arms


def _arm_name(args: argparse.Namespace, subject: Subject, draft: str, block_size: int | str) -> str:
    """The name of an arm: its draft if there are several, its block size if it was asked for."""
    if len(subject.drafts) == 1:
        return f"block {block_size}"
    return f"{draft} block {block_size}" if args.block_size else draft


def measure(cases: list[Case], arms: dict[str, Arm], repeats: int, seed: int) -> list[Turn]:
    """Run every arm on every prompt `repeats` times, after a short warm-up of every arm.

    Progress goes to stderr, if it is a terminal.
    """
    from tqdm import tqdm

    for arm in arms.values():
        for response in arm(cases[0].ids):
            if response.generation_tokens >= _WARM_UP:
                break
    order = random.Random(seed)
    turns = []
    with tqdm(total=len(cases) * repeats * len(arms), unit="run", disable=None) as bar:
        for repeat in range(repeats):
            for prompt, case in enumerate(cases):
                done = {}
                for name in order.sample(list(arms), len(arms)):
                    mx.random.seed(seed)
                    done[name] = run(arms[name], case.ids)
                    bar.update()
                turns.append(Turn(repeat, prompt, case, {name: done[name] for name in arms}))
    return turns


def run(arm: Arm, ids: list[int]) -> Run:
    """Time one arm on one prompt."""
    mx.clear_cache()
    mx.reset_peak_memory()
    tokens: list[int] = []
    response: Any = None
    began = time.perf_counter()
    for response in arm(ids):
        if not tokens:
            first, first_cpu = time.perf_counter(), time.process_time()
        tokens.append(response.token)
    seconds, cpu_seconds = time.perf_counter() - first, time.process_time() - first_cpu
    stats = getattr(response, "stats", None)
    return Run(tokens, first - began, seconds, cpu_seconds, mx.get_peak_memory() / 1e9, stats)


def differences(turns: list[Turn], plain: Arm, seed: int) -> list[dict[str, Any]]:
    """Return where drafted texts leave plain mlx-lm's, once for each prompt and arm.

    An entry has the number of the prompt, the arm, the position and, for both tokens that stand there, the
    log-probability that plain mlx-lm gives them.
    """
    found = []
    for turn in turns:
        expected = turn.runs[PLAIN].tokens
        for name, other in turn.runs.items():
            if turn.repeat or other.tokens == expected:
                continue
            same = [a == b for a, b in zip(other.tokens, expected)]
            at = same.index(False) if False in same else len(same)
            entry: dict[str, Any] = {"prompt": turn.prompt, "arm": name, "position": at}
            if at < len(same):
                mx.random.seed(seed)
                logprobs = next(r.logprobs for n, r in enumerate(plain(turn.case.ids)) if n == at)
                for key, token in (("plain", expected[at]), ("drafted", other.tokens[at])):
                    entry[key] = {"token": token, "logprob": round(logprobs[token].item(), 6)}
            found.append(entry)
    return found
