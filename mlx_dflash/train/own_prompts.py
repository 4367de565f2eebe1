"""Prompts that nobody has to write: what the target says where a user would speak.

A draft learns from the target's answers, and the questions that a chat model was trained on come easily to itself.
Source: Magpie, alignment data synthesis from scratch by prompting aligned LLMs with nothing (Xu et al., 2024).
"""

import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

import mlx.core as mx

from .answers import Style
from .files import open_alone
from .prompts import Prompt

_MOST_TOKENS = 128  # of a prompt; longer ones are given up
_TEMPERATURE = 0.9
_PATIENCE = 50  # answers in turn that are no new prompt
_PLACE = "USER-SPEAKS-HERE"

Answers = Callable[[Iterator[tuple[int, Prompt]], Style], Iterator[Any]]


def write_own_prompts(path: Path, count: int, tokenizer: Any, answers: Answers, seed: int) -> Iterator[int]:
    """Add prompts to a .jsonl file until it has `count`, all different; yield how many are there, first and after each.

    answers: lets the target go on with prompts. Raises ValueError where the chat template has no place for a user,
    and where the target no longer says anything new there.
    """
    opening, end = _place_of_user(tokenizer)
    path.parent.mkdir(parents=True, exist_ok=True)
    with open_alone(path) as file:
        seen = _whole_lines(path, file)
        yield len(seen)
        if len(seen) >= count:
            return
        mx.random.seed(seed + len(seen))
        missed, style = 0, Style(_MOST_TOKENS, sampled_share=1.0, temperature=_TEMPERATURE, seed=seed)
        said = answers(((number, opening) for number in itertools.count(len(seen))), style)
        try:
            for sample in said:
                line = _line(tokenizer, sample.tokens[sample.prompt_length :], end)
                missed = missed + 1 if line is None or line in seen else 0
                if missed > _PATIENCE:
                    raise ValueError(f"the target says nothing new where a user would speak: {len(seen)} prompts of {count}; give a file of --prompts")
                if missed:
                    continue
                seen.add(line)
                file.write(line + "\n")
                file.flush()
                yield len(seen)
                if len(seen) == count:
                    return
        finally:
            said.close()


def _whole_lines(path: Path, file: TextIO) -> set[str]:
    """The lines of a file, which loses a last one that was cut off. file: it, open to append to."""
    before, _, last = path.read_bytes().rpartition(b"\n")
    lines = before.decode().split("\n")
    if _is_json(last):
        lines.append(last.decode())
        file.write("\n")
    else:
        file.truncate(path.stat().st_size - len(last))
    return set(lines) - {""}


def _is_json(text: bytes) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def _place_of_user(tokenizer: Any) -> tuple[Prompt, str]:
    """A conversation up to where its user speaks, and the text that ends the user's turn."""
    if not tokenizer.has_chat_template:
        raise ValueError("the target has no chat template, so it cannot speak as a user; give a file of --prompts")
    messages = [{"role": "user", "content": _PLACE}]
    before, _, after = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False).partition(_PLACE)
    ids = tokenizer.encode(before, add_special_tokens=False)
    if not ids or not after.strip():
        raise ValueError("the target's chat template does not show where a user's turn begins and ends; give a file of --prompts")
    return Prompt(ids, len(ids)), after.strip().splitlines()[0]


def _line(tokenizer: Any, tokens: Sequence[int], end: str) -> str | None:
    """A line of the file, None if the turn did not end or is empty."""
    has_ended = tokens[-1] in tokenizer.eos_token_ids
    text, found, _ = tokenizer.decode(tokens[:-1] if has_ended else tokens).partition(end)
    if not text.strip() or not (found or has_ended):
        return None
    return json.dumps({"prompt": text.strip()}, ensure_ascii=False)
