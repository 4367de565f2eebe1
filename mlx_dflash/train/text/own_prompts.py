"""Prompts that nobody has to write: what the target says where a user would speak.

A draft learns from the target's answers, and a chat model knows by heart what users ask.
Source: Magpie, alignment data synthesis from scratch by prompting aligned LLMs with nothing (Xu et al., 2024).
"""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx

from ...commands.prompt_files import Prompt, read_prompts
from ...commands.templates import render
from ...files.json_text import parse_json
from ..files import open_alone
from .answers import Style
from .corpus import Sample

_MOST_TOKENS = 128  # of a prompt; longer ones are given up
_STYLE = Style(_MOST_TOKENS, sampled_share=1.0, temperature=0.9)
_PATIENCE = 50  # turns that are no new prompt, one after the other
_PLACE = "USER-SPEAKS-HERE"
_BEGINNING = b'{"prompt": "'  # of a line

Answers = Callable[[Iterable[tuple[int, Prompt]], Style], Iterator[Sample]]


class OwnPrompts:
    """Lets a target speak as a user. Raises ValueError where its chat template has no place for one."""

    def __init__(self, tokenizer: Any):
        self.tokenizer = tokenizer
        self._opening, self._end = _place_of_user(tokenizer)

    def write(self, path: Path, count: int, answers: Answers, seed: int) -> Iterator[int]:
        """Add prompts to a .jsonl file until it has `count`, all different.

        Yields how many are there: first of all, and after each that is added. answers: lets the target go on with
        prompts. Raises ValueError that names the line for a file of something else, and where the target says nothing
        new any more.
        """
        with open_alone(path) as file:
            file.truncate(_whole_bytes(path.read_bytes()))
            found = read_prompts(path, self.tokenizer) if path.stat().st_size else []
            lines = path.read_text(encoding="utf-8").split("\n")
            if lines[-1]:
                file.write("\n")
            number = len(found)
            yield number
            mx.random.seed(seed + number)
            seen, missed = set(lines), 0
            while number < count:
                # All that are begun are heard to their end: else the file would hold the short ones.
                for sample in answers([(i, self._opening) for i in range(number, count)], _STYLE):
                    line = self._line(sample.tokens[sample.prompt_length :])
                    missed = missed + 1 if line is None or line in seen else 0
                    if missed > _PATIENCE:
                        raise ValueError(
                            f"{missed} times in a row the target said nothing new as a user, or no end in "
                            f"{_MOST_TOKENS} tokens; give a file of --prompts"
                        )
                    if not missed:
                        seen.add(line)
                        file.write(line + "\n")
                        file.flush()
                        number += 1
                        yield number

    def _line(self, tokens: Sequence[int]) -> str | None:
        """A line of the file, None if the turn did not end, is empty or holds more than a user's words."""
        has_ended = tokens[-1] in self.tokenizer.eos_token_ids
        text, found, _ = self.tokenizer.decode(tokens[:-1] if has_ended else tokens).partition(self._end)
        text = text.strip()
        if not text or not (found or has_ended) or any(token in text for token in self.tokenizer.all_special_tokens):
            return None
        return json.dumps({"prompt": text}, ensure_ascii=False)


def _place_of_user(tokenizer: Any) -> tuple[Prompt, str]:
    """A conversation up to where its user speaks, and the text that ends the user's turn."""
    if not tokenizer.has_chat_template:
        raise ValueError("the target has no chat template, so it cannot speak as a user; give a file of --prompts")
    messages = [{"role": "user", "content": _PLACE}]
    text = render(tokenizer, messages)
    before, _, after = text.partition(_PLACE)
    # Its space, if any, is part of the user's first token.
    ids, after = tokenizer.encode(before.rstrip(" "), add_special_tokens=False), after.strip()
    if not ids or not after:
        raise ValueError(
            "the target's chat template does not show where a user's turn begins and ends; give a file of --prompts"
        )
    first = [token for token in tokenizer.all_special_tokens if after.startswith(token)]
    return Prompt(ids, len(ids)), max(first, key=len) if first else after.splitlines()[0]


def _whole_bytes(content: bytes) -> int:
    """Count the bytes of a file that are whole lines: all, unless a line was cut off as it was written."""
    before, newline, last = content.rpartition(b"\n")
    is_ours = _BEGINNING.startswith(last[: len(_BEGINNING)])
    return len(before + newline) if is_ours and not _is_json(last) else len(content)


def _is_json(text: bytes) -> bool:
    """Whether a line is whole."""
    try:
        parse_json(text)
    except ValueError:
        return False
    return True
