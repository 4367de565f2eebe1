"""Read files of prompts, conversations and plain text, as token ids: what a target is asked, or learns from.

Knows file formats and the tokenizer's chat template; knows nothing of models.
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2.exceptions import TemplateError

from ..files.json_text import parse_json, told

_KEYS = ("prompt", "messages", "text")


@dataclass(frozen=True)
class Prompt:
    """A prompt, or a whole text.

    ids: of all of it. length: number of ids that come before the answer. kind: its class, or "".
    """

    ids: list[int]
    length: int
    kind: str = ""


def read_prompts(path: str | Path, tokenizer: Any) -> list[Prompt]:
    """Read prompts to be answered.

    A .jsonl file has an object a line: {"prompt": text}, {"messages": [...]} that end with the user's, or {"text":
    beginning of a text}, which is continued without the chat template; and a "class", if there are several. In any
    other file each line is a prompt. Raises ValueError that names the line for anything malformed, and for a file
    without prompts.
    """
    return _read(Path(path), tokenizer, is_answered=False)


def read_texts(path: str | Path, tokenizer: Any, length: int) -> list[Prompt]:
    """Read text to learn from as it is, in pieces of at most `length` ids.

    A .jsonl file has an object a line: {"text": ...}, or {"messages": [...]} that end with the assistant's, or
    {"prompt": ..., "response": ...}. Any other file is one text, a folder all texts in it. Raises ValueError that names
    the line for anything malformed, and for a place without text.
    """
    path = Path(path)
    if path.is_dir():
        texts = {file: _text_of(file) for file in sorted(path.rglob("*")) if file.is_file()}
        if others := [file for file, text in texts.items() if text is None]:
            print(
                f"{path}: {len(others)} of {len(texts)} files are no UTF-8 text and are left out, as {others[0]}",
                file=sys.stderr,
            )
        found = [Prompt(tokenizer.encode(text), 1) for text in texts.values() if text]
    elif path.suffix == ".jsonl":
        found = _read(path, tokenizer, is_answered=True)
    elif (text := _text_of(path)) is None:
        raise ValueError(f"{path} is no UTF-8 text")
    else:
        found = [Prompt(tokenizer.encode(text), 1)]
    pieces = [
        Prompt(p.ids[start : start + length], max(1, p.length - start), p.kind)
        for p in found
        for start in range(0, len(p.ids), length)
        if start + length > p.length
    ]
    pieces = [p for p in pieces if len(p.ids) > p.length]
    if not pieces:
        raise ValueError(f"{path} holds no text to learn from")
    return pieces


def _text_of(file: Path) -> str | None:
    """Return the text of a file, None if it is no UTF-8."""
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return None


def _read(path: Path, tokenizer: Any, is_answered: bool) -> list[Prompt]:
    prompts = []
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                entry = parse_json(line) if path.suffix == ".jsonl" else {"prompt": line.decode().strip()}
                prompts.append(_prompt(entry, tokenizer, is_answered))
            except (ValueError, TemplateError) as error:
                raise ValueError(f"{path}, line {number}: {error}") from error
    if not prompts:
        raise ValueError(f"{path} holds no prompts")
    return prompts


def _prompt(entry: Any, tokenizer: Any, is_answered: bool) -> Prompt:
    if not isinstance(entry, dict):
        raise ValueError(f"expected an object, got {type(entry).__name__}")
    given = [key for key in _KEYS if key in entry]
    if len(given) != 1:
        raise ValueError(f"expected one of {', '.join(_KEYS)}, got the keys {told(sorted(entry))}")
    kind = entry.get("class", "")
    if not isinstance(kind, str):
        raise ValueError(f"class must be text, got {told(kind)}")
    if given == ["text"]:
        ids = tokenizer.encode(_string(entry, "text"))
        if not ids:
            raise ValueError("text is empty")
        return Prompt(ids, 1 if is_answered else len(ids), kind)
    messages = entry["messages"] if given == ["messages"] else [{"role": "user", "content": _string(entry, "prompt")}]
    if given == ["prompt"] and is_answered:
        messages.append({"role": "assistant", "content": _string(entry, "response")})
    _check_messages(messages, "assistant" if is_answered else "user")
    asked = _render(tokenizer, messages[:-1] if is_answered else messages)
    if not asked:
        raise ValueError("the prompt is empty")
    if not is_answered:
        return Prompt(asked, len(asked), kind)
    end = tokenizer.eos_token_id  # of those that end a text, the one that ends an answer
    whole = asked + tokenizer.encode(messages[-1]["content"], add_special_tokens=False) + ([] if end is None else [end])
    return Prompt(whole, len(asked), kind)


def _render(tokenizer: Any, messages: list[dict[str, str]]) -> list[int]:
    """Return the ids of a conversation that the assistant is to answer; of the bare text without a chat template."""
    if not tokenizer.has_chat_template:
        return tokenizer.encode("\n\n".join(m["content"] for m in messages))
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True)


def _string(entry: dict[str, Any], key: str) -> str:
    value = entry.get(key)
    if not isinstance(value, str) or not value:
        raise ValueError(f"{key} must be text, got {told(value)}")
    return value


def _check_messages(messages: Any, last: str) -> None:
    if not isinstance(messages, list) or not messages:
        raise ValueError("messages must be a list of objects with role and content")
    for message in messages:
        if not isinstance(message, dict) or not all(isinstance(message.get(key), str) for key in ("role", "content")):
            raise ValueError(f"each message needs a role and a content, both text; got {told(message)}")
    if messages[-1]["role"] != last:
        raise ValueError(f"the last message must be the {last}'s, got {told(messages[-1]['role'])}")
