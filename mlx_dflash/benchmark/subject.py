"""The subject of a benchmark: a target, drafts for it, and prompts.

Knows pairs, the built-in prompts and files of prompts; knows nothing of arms, of clocks or of reports.
"""

import argparse
import json
import tempfile
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any, TypeVar

from .. import pair
from ..checkpoints.drafts import load_draft
from ..checkpoints.known_pairs import find_draft
from ..commands.prompt_files import read_prompts
from ..commands.templates import encode_messages
from .constructed import SHAPES, ConstructedPair, expected_acceptance_length

PROMPTS = Path(__file__).parent / "prompts.jsonl"
_NO_CLASS = "no class"

T = TypeVar("T")


@dataclass(frozen=True)
class Case:
    """One prompt. group: the class of prompts, or the length of context, that it is reported in."""

    group: str
    ids: list[int]


@dataclass(frozen=True)
class Subject:
    """A target, its drafts and the prompts that are measured.

    drafts: by the shortest names that tell them apart. cases: in the order in which they run. name: what the report
    says of the pair.
    """

    model: Any
    tokenizer: Any
    drafts: dict[str, Any]
    cases: list[Case]
    name: dict[str, Any]


def load_subject(args: argparse.Namespace) -> Subject:
    """Load the target, its drafts and the prompts that the flags name. Raises ValueError for what does not fit."""
    if args.constructed is not None:
        return _constructed(args)
    if args.prompts and not Path(args.prompts).is_file():
        raise ValueError(f"--prompts {args.prompts}: there is no such file")
    named = args.draft_model or [find_draft(args.model)]
    short = short_names([str(name) for name in named])
    model, tokenizer, first = pair.load_pair(
        args.model,
        named[0],
        tokenizer_config={"trust_remote_code": args.trust_remote_code},
        trust_remote_code=args.trust_remote_code,
    )
    others = [load_draft(str(name)) for name in named[1:]]
    for draft in others:
        pair.Pair(model, draft)
    name = {"model": args.model, "draft_model": one_or_all(named)}
    return Subject(model, tokenizer, dict(zip(short, [first, *others])), _cases(args, tokenizer), name)


def one_or_all(values: list[T]) -> T | list[T]:
    """Return the only value of a list, or the list if it has several: how a report tells of drafts."""
    return values[0] if len(values) == 1 else values


def short_names(paths: list[str]) -> list[str]:
    """Return the shortest ends of paths that tell them apart. Raises ValueError for a path that is given twice."""
    parts = [Path(path).parts or (path,) for path in paths]
    if len(set(parts)) != len(parts):
        raise ValueError(f"--draft-model names a draft twice: {', '.join(paths)}")
    lengths = range(1, max(map(len, parts)) + 1)
    ends = (["/".join(path[-length:]) for path in parts] for length in lengths)
    return next(names for names in ends if len(set(names)) == len(names))


def in_turn(items: list[tuple[str, T]], count: int | None = None) -> list[tuple[str, T]]:
    """Return the first `count` items (class, value), all if None, taking the classes in turn.

    Raises ValueError if there are fewer.
    """
    classes: dict[str, list[tuple[str, T]]] = {}
    for item in items:
        classes.setdefault(item[0], []).append(item)
    found = [item for turn in zip_longest(*classes.values()) for item in turn if item is not None]
    if count is not None and count > len(found):
        raise ValueError(f"there are {len(found)} prompts, --num-prompts asks for {count}")
    return found[:count]


def _cases(args: argparse.Namespace, tokenizer: Any) -> list[Case]:
    if not args.context:
        prompts = [(p.kind or _NO_CLASS, p.ids) for p in read_prompts(args.prompts or PROMPTS, tokenizer)]
        return [Case(group, ids) for group, ids in in_turn(prompts, args.num_prompts)]
    entries = map(json.loads, PROMPTS.read_text().splitlines())
    texts = in_turn([(entry["class"], entry["prompt"]) for entry in entries])
    filler = tokenizer.encode(" ".join(text for _, text in texts), add_special_tokens=False)
    return [
        Case(f"context {length}", _filled_up(tokenizer, prompt, filler, length))
        for length in args.context
        for _, prompt in in_turn(texts, args.num_prompts)
    ]


def _filled_up(tokenizer: Any, prompt: str, filler: list[int], length: int) -> list[int]:
    """The ids of a user's message that begins with as much of the filler as makes about `length` tokens in all."""

    def encode(text: str) -> list[int]:
        return encode_messages(tokenizer, [{"role": "user", "content": text}])

    num_asked = len(encode(prompt))
    if length < num_asked:
        raise ValueError(f"--context {length} is shorter than a prompt of {num_asked} tokens")
    filler = filler * (length // len(filler) + 1)
    return encode(tokenizer.decode(filler[: length - num_asked]) + "\n\n" + prompt)


def _constructed(args: argparse.Namespace) -> Subject:
    built = ConstructedPair(SHAPES[args.shape])
    longest = built.shape.longest
    if args.max_tokens > longest:
        raise ValueError(
            f"the constructed pair gives up to {longest} tokens a prompt, got --max-tokens {args.max_tokens}"
        )
    cases = [
        Case("constructed" if length is None else f"context {length}", built.prompt(args.constructed, length, seed))
        for length in args.context or [None]
        for seed in range(args.num_prompts)
    ]
    with tempfile.TemporaryDirectory() as folder:
        target_path, draft_path = built.save(folder)
        model, tokenizer, draft = pair.load_pair(str(target_path), str(draft_path))
    name = {
        "constructed": args.shape,
        "rate": args.constructed,
        "expected_acceptance_length": expected_acceptance_length(args.constructed, built.shape.block_size),
    }
    return Subject(model, tokenizer, {"constructed": draft}, cases, name)
