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


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of this step."""
    add = parser.add_argument
    add("--model", required=True, help="target: a folder or hub repository, or demo")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--prompts", help="file of prompts that the target answers: .jsonl, or one a line")
    source.add_argument("--text", help="text to take as it is: a .jsonl file, a text file, or a folder of them")
    add("--out", required=True, help="file to write, or to continue")
    add("--draft-model", help="speeds up the answers of a target whose caches do not batch")
    add("--max-tokens", type=int, default=256, help="most tokens of an answer (default: %(default)s)")
    add("--max-length", type=int, default=2048, help="tokens of a piece of text (default: %(default)s)")
    add("--sampled-share", type=float, default=0.5, help="share of the prompts that are answered by sampling, the rest greedily (default: %(default)s)")
    add("--temp", type=float, default=0.7, help="temperature of the sampled answers (default: %(default)s)")
    add("--top-p", type=float, default=1.0, help="nucleus of the sampled answers (default: off)")
    add("--batch-size", type=int, default=32, help="prompts answered at a time (default: %(default)s)")
    add("--seed", type=int, default=0, help="of the sampling (default: %(default)s)")
    add("--trust-remote-code", action="store_true", help="let the tokenizer run its own code")


def run(args: argparse.Namespace) -> None:
    """Write what is missing in the file."""
    import mlx.core as mx

    from ..loading import check_pair, load, load_draft
    from ..structure import Structure

    style = Style(args.max_tokens, args.sampled_share, args.temp, args.top_p, args.seed)
    for name in ("batch_size", "max_length"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be 1 or more, got {getattr(args, name)}")
    if not Path(args.prompts or args.text).exists():
        raise ValueError(f"{args.prompts or args.text} does not exist")
    model, tokenizer = load(args.model, tokenizer_config={"trust_remote_code": args.trust_remote_code})
    prompts = read_prompts(args.prompts, tokenizer) if args.prompts else read_texts(args.text, tokenizer, args.max_length)
    header = {"target": args.model, "vocab_size": Structure(model).vocab_size, "from": args.prompts or args.text}
    header |= vars(style) if args.prompts else {"max_length": args.max_length}
    writer = CorpusWriter(args.out, header)
    todo = [(i, prompt) for i, prompt in enumerate(prompts) if i not in writer.sources]
    found = len(writer.sources)
    draft = None
    if args.text:
        samples: Iterator[Sample] = (Sample(p.ids, p.length, i, p.kind) for i, p in todo)
    elif can_batch(model):
        mx.random.seed(args.seed + found)
        samples = batched_answers(model, tokenizer, todo, style, args.batch_size)
    else:
        if args.draft_model:
            draft = load_draft(args.draft_model)
            check_pair(model, draft)
        samples = single_answers((model, tokenizer, draft), todo, style)
    print(report(args.out, _write(writer, samples, prompts), found))


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
            print("interrupted; the same command goes on", file=sys.stderr)
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
