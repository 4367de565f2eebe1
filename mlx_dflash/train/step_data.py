"""Write training text: the target's own answers to prompts, which it may write too, or existing text as it is."""

import argparse
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, NoReturn

import mlx.core as mx

from ..commands.prompt_files import Prompt, read_prompts, read_texts
from .text.answers import Style, batched_answers, can_batch, single_answers
from .text.corpus import CorpusWriter, Sample
from .text.own_prompts import Answers, OwnPrompts

_DEFAULTS = {
    "max_tokens": 256,
    "sampled_share": 0.5,
    "temp": 0.7,
    "top_p": 1.0,
    "batch_size": 32,
    "seed": 0,
    "draft_model": None,  # of answers
    "max_length": 2048,  # of text as it is
}


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of this step."""
    add = parser.add_argument
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--prompts", help="file of prompts that the target answers: .jsonl, or one a line")
    source.add_argument(
        "--own-prompts",
        type=int,
        metavar="N",
        help="let a chat model write the prompts too, N in all; kept beside OUT, as data.prompts.jsonl beside data.jsonl",
    )
    source.add_argument("--text", help="text to take as it is: a .jsonl file, a text file, or a folder of them")
    add("--out", required=True, help="file to write, or to continue")
    add("--draft-model", help="speeds up the answers of a target whose caches do not batch")
    add("--max-tokens", type=int, help="most tokens of an answer (default: %(default)s)")
    add("--max-length", type=int, help="with --text, tokens of a piece of it (default: %(default)s)")
    add(
        "--sampled-share",
        type=float,
        help="share of the prompts that are answered by sampling, the rest greedily (default: %(default)s)",
    )
    add("--temp", type=float, help="temperature of the sampled answers (default: %(default)s)")
    add("--top-p", type=float, help="nucleus of the sampled answers (default: off)")
    add("--batch-size", type=int, help="prompts answered at a time (default: %(default)s)")
    add("--seed", type=int, help="of the sampling (default: %(default)s)")
    parser.set_defaults(**_DEFAULTS)


def run(args: argparse.Namespace) -> None:
    """Write what is missing in the file."""
    from ..checkpoints.targets import load
    from ..models.structure import Structure

    _check(args)
    style = Style(args.max_tokens, args.sampled_share, args.temp, args.top_p, args.seed)
    model, tokenizer = load(args.model, tokenizer_config={"trust_remote_code": args.trust_remote_code})
    header = {
        "target": args.model,
        "vocab_size": Structure(model).vocab_size,
        "from": args.text or args.prompts or "prompts of its own",
    }
    header |= {"max_length": args.max_length} if args.text else vars(style)
    own = OwnPrompts(tokenizer) if args.own_prompts else None
    if args.text:
        prompts = read_texts(args.text, tokenizer, args.max_length)
    elif args.prompts:
        prompts = read_prompts(args.prompts, tokenizer)
    answers = None if args.text else _answers(args, model, tokenizer)
    with closing(CorpusWriter(args.out, header)) as writer:
        if own:
            path = _own_prompts(args, own, answers)
            # Those that were answered when more were asked for stay.
            prompts = read_prompts(path, tokenizer)[: max([args.own_prompts, *(i + 1 for i in writer.sources)])]
        for i, ids in writer.sources.items():
            if i >= len(prompts) or ids != prompts[i].ids[: prompts[i].length]:
                raise ValueError(
                    f"{args.out} holds an answer to another prompt {i + 1} than there is now; choose another file to write to"
                )
        todo = [(i, prompt) for i, prompt in enumerate(prompts) if i not in writer.sources]
        found = len(writer.sources)
        mx.random.seed(args.seed + found)
        samples = (Sample(p.ids, p.length, i, p.kind) for i, p in todo) if answers is None else answers(todo, style)
        done = _write(writer, samples, prompts)
    print(report(args.out, done, found))
    if done["samples"] < done["of"]:
        _leave()


def _check(args: argparse.Namespace) -> None:
    """Raise ValueError for what can be refused before the target is loaded."""
    _refuse_unused(args)
    for name, least in (("batch_size", 1), ("max_length", 2), ("seed", 0), ("own_prompts", 1)):
        value = getattr(args, name)
        if value is not None and value < least:
            raise ValueError(f"--{name.replace('_', '-')} must be {least} or more, got {value}")
    path = args.prompts or args.text
    if path and not Path(path).exists():
        raise ValueError(f"{path} does not exist")


def _answers(args: argparse.Namespace, model: Any, tokenizer: Any) -> Answers:
    """How the target answers: many prompts at a time if it can, or one by one."""
    from ..checkpoints.drafts import load_draft
    from ..pair import Pair

    if can_batch(model):
        if args.draft_model:
            raise ValueError(
                "--draft-model is for targets whose caches do not batch; this one answers many prompts at a time without"
            )
        return lambda todo, style: batched_answers(model, tokenizer, todo, style, args.batch_size)
    draft = None
    if args.draft_model:
        draft = load_draft(args.draft_model)
        Pair(model, draft)
    return lambda todo, style: single_answers((model, tokenizer, draft), todo, style)


def _own_prompts(args: argparse.Namespace, own: OwnPrompts, answers: Answers) -> Path:
    """Let the target write what is missing of its prompts; return their file, which is beside the one to write."""
    from tqdm import tqdm

    out = Path(args.out)
    path = out.with_name(out.name.removesuffix(".jsonl") + ".prompts.jsonl")
    counts = own.write(path, args.own_prompts, answers, args.seed)
    try:
        with tqdm(total=args.own_prompts, initial=next(counts), unit="prompt", disable=None) as bar:
            for _ in counts:
                bar.update()
    except KeyboardInterrupt:
        _leave()
    return path


def _leave() -> NoReturn:
    """End as Ctrl-C does."""
    print("interrupted; the same command goes on", file=sys.stderr)
    sys.exit(130)


def _refuse_unused(args: argparse.Namespace) -> None:
    """Raise ValueError for options that the other source of text would need."""
    source = "--text" if args.text else "--own-prompts" if args.own_prompts is not None else "--prompts"
    unused = [key for key in _DEFAULTS if (key == "max_length") != (source == "--text")]
    given = [f"--{key.replace('_', '-')}" for key in unused if getattr(args, key) != _DEFAULTS[key]]
    if given:
        raise ValueError(f"{', '.join(given)} cannot go with {source}")


def _write(writer: CorpusWriter, samples: Iterator[Sample], prompts: list[Prompt]) -> dict[str, Any]:
    """Append the samples, with a bar; what was written also counts after Ctrl-C."""
    from tqdm import tqdm

    began, before, kinds = time.perf_counter(), writer.num_tokens, Counter()
    with tqdm(total=len(prompts), initial=len(writer.sources), unit="sample", disable=None) as bar:
        try:
            for sample in samples:
                writer.append(sample)
                kinds[sample.kind or "no class"] += 1
                bar.update()
                bar.set_postfix_str(f"{(writer.num_tokens - before) / (time.perf_counter() - began):.0f} tokens/s")
        except KeyboardInterrupt:
            pass  # the report says how far it came
    return {
        "samples": len(writer.sources),
        "of": len(prompts),
        "tokens": writer.num_tokens,
        "new tokens": writer.num_tokens - before,
        "seconds": time.perf_counter() - began,
        "kinds": kinds,
    }


def report(path: str, done: dict[str, Any], found: int) -> str:
    """What the file holds now, in a few lines."""
    lines = [f"{path}: {done['samples']} of {done['of']} samples, {done['tokens']} tokens to learn"]
    if found:
        lines.append(f"  {found} samples were there already")
    if done["new tokens"]:
        lines.append(
            f"  {done['new tokens']} new tokens in {done['seconds']:.1f} s, {done['new tokens'] / done['seconds']:.1f} tokens/s"
        )
        lines.append("  " + ", ".join(f"{kind} {count}" for kind, count in done["kinds"].most_common()))
    return "\n".join(lines)
