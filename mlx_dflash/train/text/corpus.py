"""Training text on disk: one JSON line of token ids a sample, behind a header that says whose tokens they are.

A file only grows, sample by sample, so what a killed run leaves is a file that the next run continues.
Knows files and ids; knows nothing of models.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...files.json_text import parse_json, told
from ..files import open_alone, refuse_other

FORMAT = "mlx_dflash training text 1"


@dataclass(frozen=True)
class Sample:
    """tokens: ids of prompt and answer. prompt_length: how many are the prompt's. source: number of its prompt or text.

    kind: the class that its prompt was given, for reports. is_greedy: whether the target took the likeliest token.
    """

    tokens: list[int]
    prompt_length: int
    source: int = 0
    kind: str = ""
    is_greedy: bool = False


class CorpusWriter:
    """Appends samples to a file. sources: numbers of those that it holds, with the ids of their prompts.

    header: what the samples depend on; vocab_size (int) is needed. Raises ValueError if the file has another header,
    or is no training text.
    """

    def __init__(self, path: str | Path, header: dict[str, Any]):
        self.path = Path(path)
        self.sources: dict[int, list[int]] = {}
        self.num_tokens = 0
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open_alone(self.path)
        try:
            self._go_on({"format": FORMAT, **header})
        except ValueError:
            self._file.close()
            raise

    def _go_on(self, header: dict[str, Any]) -> None:
        """Check and count what is in the file: nothing, or a header and samples, the last one perhaps in part."""
        content = self.path.read_bytes()
        if b"\n" in content:
            refuse_other(self.path, read_header(self.path), header, "another file to write to")
            self._file.truncate(content.rfind(b"\n") + 1)
            for sample in read_corpus(self.path):
                self._count(sample)
        else:
            if not _line(header).encode().startswith(content):
                read_header(self.path)
            self._file.truncate(0)
            self._write(header)

    def append(self, sample: Sample) -> None:
        """Write a sample, at once."""
        self._count(sample)
        self._write(vars(sample))

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _count(self, sample: Sample) -> None:
        self.sources[sample.source] = sample.tokens[: sample.prompt_length]
        self.num_tokens += len(sample.tokens) - sample.prompt_length

    def _write(self, line: dict[str, Any]) -> None:
        self._file.write(_line(line))
        self._file.flush()


def _line(value: dict[str, Any]) -> str:
    return json.dumps(value, separators=(",", ":")) + "\n"


def read_header(path: str | Path) -> dict[str, Any]:
    """Read the first line of a file of samples. Raises ValueError if it is none."""
    with open(path, encoding="utf-8", errors="replace") as file:
        line = file.readline()
    try:
        header = parse_json(line)
    except ValueError:
        header = None
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        raise ValueError(
            f"{path} is no training text: line 1 must say {FORMAT!r}; make one with: python -m mlx_dflash.train data"
        )
    if type(header.get("vocab_size")) is not int:
        raise ValueError(f"{path}, line 1: vocab_size must be a number, got {told(header.get('vocab_size'))}")
    return header


def read_corpus(path: str | Path) -> Iterator[Sample]:
    """Read the samples of a file. Raises ValueError that names the line for anything malformed."""
    vocab_size = read_header(path)["vocab_size"]
    with open(path, encoding="utf-8", errors="replace") as file:
        next(file)
        for number, line in enumerate(file, 2):
            try:
                yield _sample(parse_json(line), vocab_size)
            except (ValueError, TypeError) as error:
                raise ValueError(f"{path}, line {number}: {error}") from error


def _sample(fields: Any, vocab_size: int) -> Sample:
    if not isinstance(fields, dict):
        raise ValueError(f"expected an object with tokens and prompt_length, got {type(fields).__name__}")
    sample = Sample(**fields)
    tokens, length = sample.tokens, sample.prompt_length
    if not isinstance(tokens, list) or not tokens or not all(type(t) is int for t in tokens):
        raise ValueError("tokens must be a list of token ids")
    if not 0 <= min(tokens) <= max(tokens) < vocab_size:
        raise ValueError(
            f"tokens reach from {told(min(tokens))} to {told(max(tokens))}; expected 0 to {told(vocab_size - 1)}, "
            "the vocabulary"
        )
    if type(length) is not int or not 0 < length <= len(tokens):
        raise ValueError(f"prompt_length must be 1 to {len(tokens)}, the number of tokens; got {told(length)}")
    if type(sample.source) is not int or not isinstance(sample.kind, str) or type(sample.is_greedy) is not bool:
        raise ValueError("source must be a number, kind text, and is_greedy true or false")
    return sample
