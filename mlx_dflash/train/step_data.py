"""Write training text: the target's own answers to prompts, or existing text as it is."""

import argparse
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .answers import Style, batched_answers, can_batch, single_answers
from .corpus import CorpusWriter, Sample
from .prompts import Prompt, read_prompts, read_texts

_DEFAULTS = {
    "max_tokens": 256, "sampled_share": 0.5, "temp": 0.7, "top_p": 1.0, "batch_size": 32, "seed": 0, "draft_model": None,  # of answers
    "max_length": 2048,  # of text as it is
}  # fmt: skip


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of this step."""
    add = parser.add_argument
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--prompts", help="file of prompts that the target answers: .jsonl, or one a line")
    source.add_argument("--text", help="text to take as it is: a .jsonl file, a text file, or a folder of them")
    add("--out", required=True, help="file to write, or to continue")
    add("--draft-model", help="speeds up the answers of a target whose caches do not batch")
    add("--max-tokens", type=int, help="most tokens of an answer (default: %(default)s)")
    add("--max-length", type=int, help="with --text, tokens of a piece of it (default: %(default)s)")
    add("--sampled-share", type=float, help="share of the prompts that are answered by sampling, the rest greedily (default: %(default)s)")
    add("--temp", type=float, help="temperature of the sampled answers (default: %(default)s)")
    add("--top-p", type=float, help="nucleus of the sampled answers (default: off)")
    add("--batch-size", type=int, help="prompts answered at a time (default: %(default)s)")
    add("--seed", type=int, help="of the sampling (default: %(default)s)")
    parser.set_defaults(**_DEFAULTS)


def run(args: argparse.Namespace) -> None:
    """Write what is missing in the file."""
    import mlx.core as mx

    from ..loading import check_pair, load, load_draft
    from ..structure import Structure

    _refuse_unused(args)
    style = Style(args.max_tokens, args.sampled_share, args.temp, args.top_p, args.seed)
    for name, least in (("batch_size", 1), ("max_length", 2), ("seed", 0)):
        if getattr(args, name) < least:
            raise ValueError(f"--{name.replace('_', '-')} must be {least} or more, got {getattr(args, name)}")
    if not Path(args.prompts or args.text).exists():
        raise ValueError(f"{args.prompts or args.text} does not exist")
    model, tokenizer = load(args.model, tokenizer_config={"trust_remote_code": args.trust_remote_code})
    prompts = read_prompts(args.prompts, tokenizer) if args.prompts else read_texts(args.text, tokenizer, args.max_length)
    header = {"target": args.model, "vocab_size": Structure(model).vocab_size, "from": args.prompts or args.text}
    header |= vars(style) if args.prompts else {"max_length": args.max_length}
    draft, is_batched = None, bool(args.prompts) and can_batch(model)
    if args.draft_model:
        if is_batched:
            raise ValueError("--draft-model is for targets whose caches do not batch; this one answers many prompts at a time without")
        draft = load_draft(args.draft_model)
        check_pair(model, draft)
    writer = CorpusWriter(args.out, header)
    for i, ids in writer.sources.items():
        if i >= len(prompts) or ids != prompts[i].ids[: prompts[i].length]:
            raise ValueError(f"{args.out} holds an answer to another prompt {i + 1} than {header['from']} has now; choose another file to write to")
    todo = [(i, prompt) for i, prompt in enumerate(prompts) if i not in writer.sources]
    found = len(writer.sources)
    mx.random.seed(args.seed + found)
    if args.text:
        samples: Iterator[Sample] = (Sample(p.ids, p.length, i, p.kind) for i, p in todo)
    elif is_batched:
        samples = batched_answers(model, tokenizer, todo, style, args.batch_size)
    else:
        samples = single_answers((model, tokenizer, draft), todo, style)
    done = _write(writer, samples, prompts)
    print(report(args.out, done, found))
    if done["samples"] < done["of"]:
        print("interrupted; the same command goes on", file=sys.stderr)
        sys.exit(130)


def _refuse_unused(args: argparse.Namespace) -> None:
    """Raise ValueError for options that the other source of text would need."""
    unused = {"max_length": _DEFAULTS["max_length"]} if args.prompts else {key: value for key, value in _DEFAULTS.items() if key != "max_length"}
    given = [f"--{key.replace('_', '-')}" for key, value in unused.items() if getattr(args, key) != value]
    if given:
        raise ValueError(f"{', '.join(given)} cannot go with {'--prompts' if args.prompts else '--text'}")


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
        finally:
            writer.close()
    return {"samples": len(writer.sources), "of": len(prompts), "tokens": writer.num_tokens, "new tokens": writer.num_tokens - before,
            "seconds": time.perf_counter() - began, "kinds": kinds}  # fmt: skip


def report(path: str, done: dict[str, Any], found: int) -> str:
    """What the file holds now, in a few lines."""
    lines = [f"{path}: {done['samples']} of {done['of']} samples, {done['tokens']} tokens to learn"]
    if found:
        lines.append(f"  {found} samples were there already")
    if done["new tokens"]:
        lines.append(f"  {done['new tokens']} new tokens in {done['seconds']:.1f} s, {done['new tokens'] / done['seconds']:.1f} tokens/s")
        lines.append("  " + ", ".join(f"{kind} {count}" for kind, count in done["kinds"].most_common()))
    return "\n".join(lines)
