"""Measure a target and its drafts: `python -m mlx_dflash.benchmark`.

Runs prompts through each draft and, with --compare, through plain mlx-lm side by side; prints a table and, in the last
line, JSON. Knows the flags and the order of the work. Measures speed and what rounds keep, nothing of a text's quality.
"""

import argparse
import json
from typing import Any

from ..checkpoints.known_pairs import NO_DRAFT
from ..commands.errors import Parser, run_command
from ..commands.flags import block_size, seed
from ..commands.sampling import check_numbers
from ..demo import DEMO
from .constructed import SHAPES
from .figure import check_plot, plot
from .measure import PLAIN, differences, make_arms, measure
from .report import Report, setup, summarize, table
from .subject import load_subject

_BUILT_IN = 12  # number of the built-in prompts that run if nothing else is asked for
_LEAST = {"max_tokens": 2, "num_prompts": 1, "repeat": 1}


def main(argv: list[str] | None = None) -> None:
    """Parse arguments, measure, print a table and, in the last line, JSON."""
    run_command(make_parser, _run, argv)


def _run(args: argparse.Namespace) -> None:
    _check(args)
    if args.num_prompts is None and not args.prompts:
        args.num_prompts = _BUILT_IN
    if args.plot:
        check_plot(args.plot)
    report = benchmark(args)
    if not args.json:
        print(table(report))
    print(json.dumps(report.as_json()))
    if args.plot:
        plot(report, args.plot)


def benchmark(args: argparse.Namespace) -> Report:
    """Measure what the flags ask for. Raises ValueError for what cannot be had."""
    subject = load_subject(args)
    arms = make_arms(args, subject)
    turns = measure(subject.cases, arms, args.repeat, args.seed)
    found = differences(turns, arms[PLAIN], args.seed) if args.compare else None
    return Report(setup(args, subject), *summarize(turns), found)


def make_parser() -> Parser:
    """Return a parser of the flags of a benchmark."""
    parser = Parser(prog="mlx_dflash.benchmark", description="Measure a target and its drafts.")
    _add_pair_flags(parser.add_argument)
    _add_work_flags(parser.add_argument)
    return parser


def _add_pair_flags(add: Any) -> None:
    add(
        "--model",
        default=DEMO,
        help="target: a folder or a repository of the Hugging Face hub (default: the demo pair's)",
    )
    add(
        "--draft-model",
        nargs="+",
        action="extend",
        metavar="DRAFT",
        help="DFlash draft that was trained for the target: a folder, a .gguf file or a repository; several are "
        "measured side by side (default: the public draft of the target)",
    )
    add(
        "--block-size",
        type=block_size,
        nargs="+",
        metavar="N",
        help="number of tokens that a round verifies, the anchor and its drafts, or 'auto' for the number that proves "
        "fastest; several are measured side by side (default: the number that the draft was trained with)",
    )
    add("--trust-remote-code", action="store_true", help="let the tokenizer run code that comes with the model")
    add(
        "--constructed",
        type=float,
        metavar="RATE",
        help="measure a pair that is built for measuring, whose drafts are right with this probability",
    )
    add(
        "--shape",
        choices=SHAPES,
        default="small",
        help="size of the pair that --constructed builds (default: %(default)s)",
    )


def _add_work_flags(add: Any) -> None:
    add("--prompts", metavar="FILE", help="file of prompts: .jsonl, or one prompt a line (default: the built-in ones)")
    add(
        "--num-prompts",
        type=int,
        metavar="N",
        help="number of prompts, taken from their classes in turn "
        f"(default: {_BUILT_IN} of the built-in ones, all of a file)",
    )
    add(
        "--context",
        type=int,
        nargs="+",
        metavar="N",
        help="fill up the built-in prompts with other text to about this number of tokens; several are measured apart",
    )
    add("--max-tokens", type=int, default=96, metavar="N", help="most tokens of each text (default: %(default)s)")
    add("--repeat", type=int, default=3, metavar="N", help="number of runs of each arm on each prompt (default: 3)")
    add("--compare", action="store_true", help="run plain mlx-lm, too, and check that the texts are the same")
    add("--temp", type=float, default=0.0, help="sampling temperature; 0 takes the likeliest token (default: 0)")
    add("--seed", type=seed, default=0, help="seed of the sampling and of the order of the arms (default: %(default)s)")
    add("--json", action="store_true", help="print the JSON line only")
    add("--plot", metavar="FILE", help="draw the numbers, too, in the format that the ending names, as in out.png")


def _check(args: argparse.Namespace) -> None:
    """Raise ValueError for numbers out of range and for flags that do not go together."""
    for name, least in _LEAST.items():
        value = getattr(args, name)
        if value is not None and value < least:
            raise ValueError(f"--{name.replace('_', '-')} must be at least {least}, got {value}")
    check_numbers({"--temp": args.temp})
    if args.constructed is not None and (args.model != DEMO or args.draft_model or args.prompts):
        raise ValueError(
            "--constructed builds its own pair and prompts; give it without --model, --draft-model and --prompts"
        )
    if args.context and args.prompts:
        raise ValueError("--context fills up the built-in prompts; give it without --prompts")
    if NO_DRAFT in (args.draft_model or ()):
        raise ValueError(f"--draft-model {NO_DRAFT} leaves nothing to measure; --compare runs plain mlx-lm")


if __name__ == "__main__":
    main()
