"""Write training text: the target's own answers to prompts, which it may write too, or existing text as it is."""

import argparse
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import mlx.core as mx

from ..commands.prompt_files import Prompt, read_prompts, read_texts
from .options import DataOptions
from .text.answers import Style, batched_answers, can_batch, single_answers
from .text.corpus import CorpusWriter, Sample
from .text.own_prompts import Answers, OwnPrompts


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this step."""
    add = parser.add_argument
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--prompts", help="file of prompts that the target answers: .jsonl, or one a line")
    source.add_argument(
        "--own-prompts",
        type=int,
        metavar="N",
        help="let a chat model write the prompts too, N in all; they are kept next to OUT, as data.prompts.jsonl",
    )
    source.add_argument("--text", help="text to take as it is: a .jsonl file, a text file, or a folder of them")
    add("--out", required=True, help="file to write, or to continue")
    add(
        "--draft-model",
        help="draft that speeds up the answers of a target whose caches do not batch: a folder or hub repository",
    )
    add("--max-tokens", type=int, help="greatest number of tokens of an answer (default: %(default)s)")
    add("--max-length", type=int, help="greatest number of tokens of a piece of --text (default: %(default)s)")
    add(
        "--sampled-share",
        type=float,
        help="share of the prompts that are answered by sampling, the rest greedily (default: %(default)s)",
    )
    add("--temp", type=float, help="temperature of the sampled answers (default: %(default)s)")
    add("--top-p", type=float, help="nucleus (top-p) of the sampled answers (default: %(default)s, which is off)")
    add("--batch-size", type=int, help="prompts answered at a time (default: %(default)s)")
    add("--seed", type=int, help="random seed of the sampled answers and prompts (default: %(default)s)")
    parser.set_defaults(**DataOptions.defaults())


def run(args: argparse.Namespace) -> None:
    """Write what is missing in the file, and say what it holds then."""
    options = DataOptions(**{field.name: getattr(args, field.name) for field in fields(DataOptions)})
    written = write_data(options)
    print(report(options.out, written))
    if written.is_interrupted:
        raise KeyboardInterrupt


@dataclass(frozen=True)
class Written:
    """The contents of a file of training text, and what was added to it. found: samples that were there before."""

    samples: int
    wanted: int
    found: int
    tokens: int
    new_tokens: int
    seconds: float
    kinds: Counter

    @property
    def is_interrupted(self) -> bool:
        """Whether Ctrl-C came before the last sample; the same options go on from there."""
        return self.samples < self.wanted


def write_data(options: DataOptions) -> Written:
    """Write the training text that is missing in the file of the options, and return what it holds then.

    Raises ValueError for options that do not fit the target, the prompts, or a file that was begun with others.
    """
    from ..checkpoints.targets import load
    from ..models.structure import Structure

    style = Style(options.max_tokens, options.sampled_share, options.temp, options.top_p, options.seed)
    model, tokenizer = load(options.model, tokenizer_config={"trust_remote_code": options.trust_remote_code})
    header = {
        "target": options.model,
        "vocab_size": Structure(model).vocab_size,
        "from": str(options.text or options.prompts or "prompts of its own"),
    }
    header |= {"max_length": options.max_length} if options.text else vars(style)
    own = OwnPrompts(tokenizer) if options.own_prompts else None
    prompts: list[Prompt] = []
    if options.text:
        prompts = read_texts(options.text, tokenizer, options.max_length)
    elif options.prompts:
        prompts = read_prompts(options.prompts, tokenizer)
    answers = None if options.text else _answers(options, model, tokenizer)
    with closing(CorpusWriter(options.out, header)) as writer:
        if own and options.own_prompts and answers:
            path = _own_prompts(options, own, answers)
            # Those that were answered when more were asked for stay.
            prompts = read_prompts(path, tokenizer)[: max([options.own_prompts, *(i + 1 for i in writer.sources)])]
        _refuse_other_prompts(options.out, writer, prompts)
        todo = [(i, prompt) for i, prompt in enumerate(prompts) if i not in writer.sources]
        mx.random.seed(options.seed + len(writer.sources))
        samples = (Sample(p.ids, p.length, i, p.kind) for i, p in todo) if answers is None else answers(todo, style)
        return _write(writer, samples, prompts)


def _refuse_other_prompts(out: str | Path, writer: CorpusWriter, prompts: list[Prompt]) -> None:
    for i, ids in writer.sources.items():
        if i >= len(prompts) or ids != prompts[i].ids[: prompts[i].length]:
            raise ValueError(
                f"{out} holds an answer to another prompt {i + 1} than there is now; choose another file to write to"
            )


def _answers(options: DataOptions, model: Any, tokenizer: Any) -> Answers:
    """Return the way in which the target answers: many prompts at a time if it can, or one by one."""
    from ..checkpoints.drafts import load_draft
    from ..pair import Pair

    if can_batch(model):
        if options.draft_model:
            raise ValueError(
                "--draft-model is for targets whose caches do not batch; this one answers many prompts at a time "
                "without"
            )
        return lambda todo, style: batched_answers(model, tokenizer, todo, style, options.batch_size)
    draft = None
    if options.draft_model:
        draft = load_draft(options.draft_model)
        Pair(model, draft)
    return lambda todo, style: single_answers((model, tokenizer, draft), todo, style)


def _own_prompts(options: DataOptions, own: OwnPrompts, answers: Answers) -> Path:
    """Let the target write what is missing of its prompts; return their file, which is beside the one to write."""
    from tqdm import tqdm

    out = Path(options.out)
    path = out.with_name(out.name.removesuffix(".jsonl") + ".prompts.jsonl")
    counts = own.write(path, options.own_prompts, answers, options.seed)
    with tqdm(total=options.own_prompts, initial=next(counts), unit="prompt", disable=None) as bar:
        for _ in counts:
            bar.update()
    return path


def _write(writer: CorpusWriter, samples: Iterator[Sample], prompts: list[Prompt]) -> Written:
    """Append the samples, with a bar; what was written also counts after Ctrl-C."""
    from tqdm import tqdm

    began, before, kinds = time.perf_counter(), writer.num_tokens, Counter()
    found = len(writer.sources)
    with tqdm(total=len(prompts), initial=len(writer.sources), unit="sample", disable=None) as bar:
        try:
            for sample in samples:
                writer.append(sample)
                kinds[sample.kind or "no class"] += 1
                bar.update()
                bar.set_postfix_str(f"{(writer.num_tokens - before) / (time.perf_counter() - began):.0f} tokens/s")
        except KeyboardInterrupt:
            pass  # the report says how far it came
    return Written(
        samples=len(writer.sources),
        wanted=len(prompts),
        found=found,
        tokens=writer.num_tokens,
        new_tokens=writer.num_tokens - before,
        seconds=time.perf_counter() - began,
        kinds=kinds,
    )


def report(path: str | Path, written: Written) -> str:
    """Say what the file holds now, in a few lines."""
    lines = [f"{path}: {written.samples} of {written.wanted} samples, {written.tokens} tokens to learn"]
    if written.found:
        lines.append(f"  {written.found} samples were there already")
    if written.new_tokens:
        speed = written.new_tokens / written.seconds
        lines.append(f"  {written.new_tokens} new tokens in {written.seconds:.1f} s, {speed:.1f} tokens/s")
        lines.append("  " + ", ".join(f"{kind} {count}" for kind, count in written.kinds.most_common()))
    return "\n".join(lines)
