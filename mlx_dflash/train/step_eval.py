"""Measure what drafts are worth on prompts: tokens a round, by class and by slot."""

import argparse
import json
from pathlib import Path
from typing import Any


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of this step."""
    add = parser.add_argument
    add(
        "--draft-model",
        required=True,
        nargs="+",
        metavar="DRAFT",
        help="drafts to measure side by side: folders or hub repositories, or demo",
    )
    add("--prompts", help="file of prompts, as for: train data (default: the built-in ones)")
    add("--num-prompts", type=int, help="use so many of them, evenly chosen (default: all)")
    add("--max-tokens", type=int, default=96, help="most tokens a prompt (default: %(default)s)")
    add("--temp", type=float, default=0.0, help="temperature; 0 is greedy (default)")
    add("--seed", type=int, default=0, help="of the sampling (default: %(default)s)")
    add("--block-size", type=int, help="anchor and drafts (default: the block that each draft was trained with)")
    add("--compare", action="store_true", help="run plain mlx-lm too: speed ratio, and whether the tokens are the same")
    add("--plot", metavar="FILE", help="draw the numbers, too; the ending says the format, as out.png")


def run(args: argparse.Namespace) -> None:
    """Generate with every draft; print a table and, in the last line, JSON."""
    import mlx_lm
    from mlx_lm.sample_utils import make_sampler

    from ..api import stream_generate
    from ..benchmark import __main__ as benchmark
    from ..benchmark.figure import check_plot, plot
    from ..checkpoints.drafts import load_draft
    from ..checkpoints.targets import load

    if args.max_tokens < 2 or args.temp < 0 or (args.num_prompts is not None and args.num_prompts < 1):
        raise ValueError(
            f"--max-tokens must be 2 or more, --num-prompts 1 or more, --temp not negative; got {args.max_tokens}, {args.num_prompts}, {args.temp}"
        )
    if args.plot:
        check_plot(args.plot)
    model, tokenizer = load(args.model, tokenizer_config={"trust_remote_code": args.trust_remote_code})
    drafts = dict(zip(_short_names(args.draft_model), map(load_draft, args.draft_model)))
    cases = _cases(args, tokenizer)
    options = dict(max_tokens=args.max_tokens, sampler=make_sampler(args.temp) if args.temp else None)
    arms = {
        name: lambda ids, draft=draft: stream_generate(
            model, tokenizer, ids, draft_model=draft, block_size=args.block_size, **options
        )
        for name, draft in drafts.items()
    }
    if args.compare:
        arms[benchmark.PLAIN] = lambda ids: mlx_lm.stream_generate(model, tokenizer, ids, **options)
    runs = benchmark.measure(cases, arms, 1, args.seed)
    report = benchmark.summarize(runs, [group for group, _ in cases], list(arms))
    for name in drafts:
        report["all"][name]["kept_by_slot"] = kept_by_slot(report["all"][name].get("histogram", []))
    setup = {"model": args.model, "prompts": len(cases), "repeat": 1, "temp": args.temp, **benchmark.machine()}
    print(table(report, list(drafts)))
    print(json.dumps({"setup": setup, **report}))
    if args.plot:
        plot({"setup": setup, **report}, args.plot, benchmark.PLAIN)


def _cases(args: argparse.Namespace, tokenizer: Any) -> list[tuple[str, list[int]]]:
    from ..benchmark.__main__ import PROMPTS
    from .text.prompts import read_prompts

    prompts = read_prompts(args.prompts or PROMPTS, tokenizer)
    if args.num_prompts and args.num_prompts < len(prompts):
        prompts = [prompts[i * len(prompts) // args.num_prompts] for i in range(args.num_prompts)]
    return [(p.kind or "no class", p.ids) for p in prompts]


def _short_names(paths: list[str]) -> list[str]:
    """The drafts' names: the last parts of their paths that tell them apart."""
    if len({Path(path) for path in paths}) != len(paths):
        raise ValueError(f"--draft-model names a draft twice: {', '.join(paths)}")
    for parts in range(1, max(len(Path(p).parts) for p in paths) + 1):
        names = ["/".join(Path(p).parts[-parts:]) for p in paths]
        if len(set(names)) == len(names):
            break
    return names


def kept_by_slot(histogram: list[int]) -> list[float]:
    """Return, for each slot, the share of its drafts that were kept where all before them were."""
    tried = [sum(histogram[i:]) for i in range(len(histogram))]
    return [round(after / before, 3) for before, after in zip(tried, tried[1:]) if before]


def table(report: dict[str, Any], drafts: list[str]) -> str:
    """Tokens a round by class and draft, then what was kept slot by slot."""
    width = max(len(name) for name in [*drafts, *report["groups"]]) + 2
    lines = ["tokens a round".ljust(width) + "".join(name.rjust(width) for name in drafts)]
    for group, told in [*report["groups"].items(), ("all", report["all"])]:
        lines.append(
            group.ljust(width) + "".join(f"{told[name].get('acceptance_length', 0):{width}.2f}" for name in drafts)
        )
    for name in drafts:
        kept = report["all"][name]["kept_by_slot"]
        lines.append(f"{name}: kept by slot, of those reached: " + " ".join(f"{100 * share:.0f} %" for share in kept))
        if "speedup_wall" in report["all"][name]:
            told = report["all"][name]
            lines.append(
                f"{name}: {told['speedup_wall'][0]:.2f} x plain (CPU time {told['speedup_cpu'][0]:.2f} x), {told['identical']} of {told['runs']} texts the same"
            )
    return "\n".join(lines)
