"""Measure a pair: `python -m mlx_dflash.benchmark`.

Runs prompts through the draft and, with --compare, through plain mlx-lm side by side: the arms of one prompt directly
after each other, in random order, so that the ratio of a pair of runs cancels what else the machine does. CPU time
stands next to wall time, for machines that do other things. Only greedy or sampled text; measures nothing of its quality.
"""

import argparse
import json
import platform
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
from mlx_lm.sample_utils import make_sampler

from .. import pair
from ..api import stream_generate
from ..checkpoints.drafts import load_draft
from ..checkpoints.known_pairs import NO_DRAFT, find_draft
from ..checkpoints.targets import load
from ..commands.flags import block_size
from ..demo import DEMO
from .constructed import SHAPES, ConstructedPair, expected_acceptance_length
from .figure import check_plot, plot

PROMPTS = Path(__file__).parent / "prompts.jsonl"
PLAIN = "mlx-lm"
_WARM_UP = 4  # tokens


@dataclass(frozen=True)
class Pair:
    """What is measured. cases: (group, prompt ids) in the order in which they run."""

    model: Any
    tokenizer: Any
    draft: Any
    cases: list[tuple[str, list[int]]]
    name: dict[str, Any]


@dataclass(frozen=True)
class Run:
    """One arm on one prompt. Times are of all tokens after the first, whose time is the prefill's."""

    arm: str
    tokens: list[int]
    prefill_seconds: float
    seconds: float
    cpu_seconds: float
    peak_gb: float
    stats: Any

    @property
    def num_timed(self) -> int:
        return len(self.tokens) - 1


def main(argv: list[str] | None = None) -> None:
    """Parse arguments, measure, print a table and, in the last line, JSON."""
    args = parse(argv)
    try:
        if args.plot:
            check_plot(args.plot)
        pair = load_pair(args)
        arms = make_arms(args, pair)
        runs = measure(pair.cases, arms, args.repeat, args.seed)
    except (ValueError, FileNotFoundError) as error:
        sys.exit(f"error: {error}")
    report = {"setup": setup(args, pair), **summarize(runs, [group for group, _ in pair.cases], list(arms))}
    if args.compare:
        report["differences"] = differences(args, pair, runs)
    if not args.json:
        print(table(report))
    print(json.dumps(report))
    if args.plot:
        try:
            plot(report, args.plot, PLAIN)
        except OSError as error:
            sys.exit(f"error: {error}")


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Read the command line; ends the program with a message for arguments that make no sense."""
    parser = argparse.ArgumentParser(prog="mlx_dflash.benchmark", description="Measure a target and its draft.")
    add = parser.add_argument
    add("--model", default=DEMO, help="target: folder or repository; default: the demo pair's")
    add("--draft-model", help="draft: folder or repository; default: the public draft of the target, found by name")
    add(
        "--block-size",
        type=block_size,
        nargs="+",
        metavar="N",
        help="anchor and drafts of a round, or auto; several are arms of their own",
    )
    add("--max-tokens", type=int, default=96, help="most tokens a prompt (default %(default)s)")
    add(
        "--num-prompts",
        type=int,
        default=12,
        help="of the built-in prompts, taken from all classes alike (default %(default)s)",
    )
    add("--repeat", type=int, default=3, help="runs of each arm on each prompt (default %(default)s)")
    add("--compare", action="store_true", help="run plain mlx-lm too; check that the text is the same")
    add("--temp", type=float, default=0.0, help="sampling temperature (default %(default)s, greedy)")
    add("--seed", type=int, default=0, help="of the sampling and of the order of arms (default %(default)s)")
    add("--context", type=int, nargs="+", metavar="N", help="sweep: prompts filled up with text to about N tokens")
    add("--constructed", type=float, metavar="RATE", help="a built pair whose drafts are right with this probability")
    add("--shape", choices=SHAPES, default="small", help="size of the constructed pair (default %(default)s)")
    add("--json", action="store_true", help="print the JSON line only")
    add("--plot", metavar="FILE", help="draw the numbers, too; the ending says the format, as out.png")
    args = parser.parse_args(argv)
    for name in ("max_tokens", "num_prompts", "repeat"):
        least = 2 if name == "max_tokens" else 1
        if getattr(args, name) < least:
            parser.error(f"--{name.replace('_', '-')} must be at least {least}, got {getattr(args, name)}")
    if args.temp < 0:
        parser.error(f"--temp must not be negative, got {args.temp}")
    if args.constructed is not None and (args.model != DEMO or args.draft_model):
        parser.error("--constructed builds its own pair; give it without --model and --draft-model")
    return args


def load_pair(args: argparse.Namespace) -> Pair:
    """Load or build the pair, and make its prompts. Raises ValueError for what does not fit together."""
    if args.constructed is not None:
        return _constructed_pair(args)
    if args.draft_model == NO_DRAFT:
        raise ValueError(f"the benchmark measures a draft, got --draft-model {NO_DRAFT}")
    model, tokenizer, draft = pair.load_pair(args.model, args.draft_model)
    draft_model = args.draft_model or find_draft(args.model)
    cases = [
        (group if length is None else f"context {length}", _encode(tokenizer, prompt, length))
        for length in args.context or [None]
        for group, prompt in prompts(args.num_prompts)
    ]
    return Pair(model, tokenizer, draft, cases, {"model": args.model, "draft_model": draft_model})


def prompts(count: int) -> list[tuple[str, str]]:
    """Return the first `count` built-in prompts (class, text), taking the classes in turn."""
    classes: dict[str, list[str]] = {}
    for line in PROMPTS.read_text().splitlines():
        entry = json.loads(line)
        classes.setdefault(entry["class"], []).append(entry["prompt"])
    in_turn = [
        (name, texts[i])
        for i in range(max(map(len, classes.values())))
        for name, texts in classes.items()
        if i < len(texts)
    ]
    if count > len(in_turn):
        raise ValueError(f"there are {len(in_turn)} built-in prompts, {count} were asked for")
    return in_turn[:count]


def _encode(tokenizer: Any, prompt: str, length: int | None) -> list[int]:
    """The prompt's ids as a user's message; with a length, behind as much other text as makes about that many tokens."""

    def chat(text: str) -> list[int]:
        if tokenizer.chat_template is None:
            return tokenizer.encode(text)
        return tokenizer.apply_chat_template([{"role": "user", "content": text}], add_generation_prompt=True)

    ids = chat(prompt)
    if length is None:
        return ids
    if length < len(ids):
        raise ValueError(f"--context {length} is shorter than a prompt of {len(ids)} tokens")
    filler = tokenizer.encode(
        " ".join(text for _, text in prompts(len(PROMPTS.read_text().splitlines()))), add_special_tokens=False
    )
    filler = filler * (length // len(filler) + 1)
    return chat(tokenizer.decode(filler[: length - len(ids)]) + "\n\n" + prompt)


def _constructed_pair(args: argparse.Namespace) -> Pair:
    built = ConstructedPair(SHAPES[args.shape])
    if args.max_tokens > built.shape.longest:
        raise ValueError(
            f"the constructed pair gives up to {built.shape.longest} tokens a prompt, got --max-tokens {args.max_tokens}"
        )
    cases = [
        ("constructed" if length is None else f"context {length}", built.prompt(args.constructed, length, seed))
        for length in args.context or [None]
        for seed in range(args.num_prompts)
    ]
    with tempfile.TemporaryDirectory() as folder:
        target_path, draft_path = built.save(folder)
        model, tokenizer = load(str(target_path))
        draft = load_draft(str(draft_path))
    name = {
        "constructed": args.shape,
        "rate": args.constructed,
        "expected_acceptance_length": expected_acceptance_length(args.constructed, built.shape.block_size),
    }
    return Pair(model, tokenizer, draft, cases, name)


Arm = Callable[[list[int]], Iterator[Any]]


def make_arms(args: argparse.Namespace, pair: Pair) -> dict[str, Arm]:
    """Return the arms by name: each a function from prompt ids to a stream of responses."""
    sampler = make_sampler(args.temp) if args.temp else None
    common = dict(max_tokens=args.max_tokens, sampler=sampler)

    def drafted(block_size: int | str) -> Arm:
        return lambda ids: stream_generate(
            pair.model, pair.tokenizer, ids, draft_model=pair.draft, block_size=block_size, **common
        )

    arms = {f"block {n}": drafted(n) for n in args.block_size or [pair.draft.config.block_size]}
    if args.compare:
        arms[PLAIN] = lambda ids: mlx_lm.stream_generate(pair.model, pair.tokenizer, ids, **common)
    return arms


def measure(cases: list[tuple[str, list[int]]], arms: dict[str, Arm], repeats: int, seed: int) -> list[list[list[Run]]]:
    """Return runs[case][repeat][arm], after a short warm-up of every arm. Progress goes to stderr, if it is a terminal."""
    from tqdm import tqdm

    for arm in arms.values():
        for response in arm(cases[0][1]):
            if response.generation_tokens >= _WARM_UP:
                break
    order = random.Random(seed)
    runs: list[list[list[Run]]] = [[] for _ in cases]
    with tqdm(total=len(cases) * repeats * len(arms), unit="run", disable=None) as bar:
        for _ in range(repeats):
            for case, (_, ids) in enumerate(cases):
                done = {}
                for name in order.sample(list(arms), len(arms)):
                    mx.random.seed(seed)
                    done[name] = run(name, arms[name], ids)
                    bar.update()
                runs[case].append([done[name] for name in arms])
    return runs


def run(name: str, arm: Arm, ids: list[int]) -> Run:
    """Time one arm on one prompt."""
    mx.clear_cache()
    mx.reset_peak_memory()
    tokens, response = [], None
    began = time.perf_counter()
    for response in arm(ids):
        if not tokens:
            first, first_cpu = time.perf_counter(), time.process_time()
        tokens.append(response.token)
    seconds, cpu_seconds = time.perf_counter() - first, time.process_time() - first_cpu
    stats = getattr(response, "stats", None)
    return Run(name, tokens, first - began, seconds, cpu_seconds, mx.get_peak_memory() / 1e9, stats)


def summarize(runs: list[list[list[Run]]], groups: list[str], names: list[str]) -> dict:
    """Return {"groups": {group: {arm: numbers}}, "all": {arm: numbers}}."""
    by_group: dict[str, list[list[Run]]] = {}
    for group, repeats in zip(groups, runs):
        by_group.setdefault(group, []).extend(repeats)
    everything = [pair for repeats in runs for pair in repeats]

    def numbers(pairs: list[list[Run]]) -> dict:
        return {
            name: _numbers([(pair[i], pair[-1]) for pair in pairs if pair[i].num_timed]) for i, name in enumerate(names)
        }

    return {"groups": {group: numbers(pairs) for group, pairs in by_group.items()}, "all": numbers(everything)}


def _numbers(pairs: list[tuple[Run, Run]]) -> dict:
    """What is told of one arm in one group. pairs: its runs, each with the run of plain mlx-lm beside it, if there is one."""
    mine = [run for run, _ in pairs]
    if not mine:
        return {"runs": 0}
    told = {
        "runs": len(mine),
        "tokens": sum(len(run.tokens) for run in mine),
        "prefill_ms": _median_ms(run.prefill_seconds for run in mine),
        "wall_ms_per_token": _spread(1e3 * run.seconds / run.num_timed for run in mine),
        "cpu_ms_per_token": _spread(1e3 * run.cpu_seconds / run.num_timed for run in mine),
        "tokens_per_second": round(sum(run.num_timed for run in mine) / sum(run.seconds for run in mine), 2),
        "peak_gb": round(max(run.peak_gb for run in mine), 3),
    }
    rounds = [run.stats for run in mine if run.stats is not None and run.stats.num_rounds]
    if rounds:
        num_rounds, num_accepted = sum(s.num_rounds for s in rounds), sum(s.num_accepted for s in rounds)
        told["acceptance_length"] = round(1 + num_accepted / num_rounds, 3)
        told["histogram"] = [
            sum(sum(s.accepted[n : n + 1]) for s in rounds) for n in range(max(len(s.accepted) for s in rounds))
        ]
        told["acceptance_rate"] = round(num_accepted / max(1, sum(s.num_drafted for s in rounds)), 3)
        for part in ("draft", "verify", "host"):
            told[f"{part}_ms_per_round"] = round(
                1e3 * sum(getattr(s, f"{part}_seconds") for s in rounds) / num_rounds, 2
            )
    if pairs[0][1].arm == PLAIN:
        told["identical"] = sum(run.tokens == plain.tokens for run, plain in pairs)
        if mine[0].arm != PLAIN:
            told["speedup_wall"] = _spread(
                plain.seconds / plain.num_timed / (run.seconds / run.num_timed) for run, plain in pairs
            )
            told["speedup_cpu"] = _spread(
                plain.cpu_seconds / plain.num_timed / (run.cpu_seconds / run.num_timed) for run, plain in pairs
            )
    return told


def _median_ms(seconds: Iterator[float]) -> float:
    return round(1e3 * statistics.median(seconds), 2)


def _spread(values: Iterator[float]) -> list[float]:
    """Median and the two quartiles."""
    values = sorted(values)
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3
    return [round(middle, 3), round(low, 3), round(high, 3)]


def differences(args: argparse.Namespace, pair: Pair, runs: list[list[list[Run]]]) -> list[dict]:
    """Where a drafted text leaves plain mlx-lm's, once a prompt and arm, with plain's log-probabilities of both tokens."""
    found = []
    for case, repeats in enumerate(runs):
        *drafted, plain = repeats[0]
        for other in drafted:
            if other.tokens == plain.tokens:
                continue
            same = [a == b for a, b in zip(other.tokens, plain.tokens)]
            at = same.index(False) if False in same else len(same)
            mx.random.seed(args.seed)
            entry = {"prompt": case, "arm": other.arm, "position": at}
            if at < len(same):
                again = make_arms(args, pair)[PLAIN](pair.cases[case][1])
                logprobs = next(r.logprobs for n, r in enumerate(again) if n == at)
                for name, token in (("plain", plain.tokens[at]), ("drafted", other.tokens[at])):
                    entry[name] = {"token": token, "logprob": round(logprobs[token].item(), 6)}
            found.append(entry)
    return found


def setup(args: argparse.Namespace, pair: Pair) -> dict:
    """What was measured, where, and how, for the JSON line."""
    lengths = [len(ids) for _, ids in pair.cases]
    return {
        **pair.name,
        **machine(),
        "draft_block_size": pair.draft.config.block_size,
        "prompts": len(pair.cases),
        "prompt_tokens": [min(lengths), max(lengths)],
        **{name: getattr(args, name) for name in ("max_tokens", "temp", "seed", "repeat")},
    }


def machine() -> dict[str, str]:
    """What the numbers of a report were measured on."""
    return {
        "machine": platform.machine(),
        "system": platform.platform(terse=True),
        "device": str(mx.default_device()),
        "mlx": version("mlx"),
        "mlx_lm": version("mlx-lm"),
    }


def table(report: dict) -> str:
    """The report as lines for people. Ratios are medians over pairs of runs, with quartiles."""
    lines = [", ".join(f"{name} {value}" for name, value in report["setup"].items()), ""]
    lines += [
        f"{'group':<14}{'arm':<10}{'tokens':>7}{'a round':>9}{'tok/s':>9}{'cpu ms/tok':>12}{'peak GB':>9}   faster than mlx-lm (wall; cpu)"
    ]
    for group, arms in [*report["groups"].items(), ("all", report["all"])]:
        for name, told in arms.items():
            if not told["runs"]:
                continue
            ratios = [told[key] for key in ("speedup_wall", "speedup_cpu") if key in told]
            lines.append(
                f"{group:<14}{name:<10}{told['tokens']:>7}{told.get('acceptance_length', ''):>9}{told['tokens_per_second']:>9}"
                f"{told['cpu_ms_per_token'][0]:>12}{told['peak_gb']:>9}   "
                + "; ".join(f"{middle:.2f} ({low:.2f} to {high:.2f})" for middle, low, high in ratios)
            )
    if "differences" in report:
        lines += ["", f"Texts that differ from mlx-lm's: {len(report['differences'])}"]
        lines += [json.dumps(difference) for difference in report["differences"]]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
