"""Conversations in files: as JSON, or together with their caches in a .safetensors file of mlx-lm's prompt caches.

Knows the files; knows nothing of templates, of generation or of the terminal.
"""

import json
from pathlib import Path
from typing import Any

from ..caches.saved import covers, load_prompt_cache, save_prompt_cache
from ..files.folders import check_writable, replaced_file
from ..files.json_text import parse_json, read_json, told
from .conversation import Conversation

CACHE_SUFFIX = ".safetensors"
_KEY = "conversation"  # of the metadata


def save(conversation: Conversation, file_name: str, pair: dict[str, str]) -> None:
    """Save a conversation as JSON, or with its caches if the name ends in .safetensors.

    pair: names of the target and the draft, which are recorded with the caches. An older file stays until the new one
    is whole. Raises ValueError if there are no caches to save yet, OSError that names the file if it cannot be written.
    """
    record = {
        "system": conversation.system,
        "messages": conversation.messages,
        "drafting": conversation.drafting,
    }
    has_caches = file_name.endswith(CACHE_SUFFIX)
    if has_caches and not conversation.pieces:
        raise ValueError("there is nothing to save yet")
    check_writable(Path(file_name))
    try:
        if has_caches:
            metadata = {**pair, _KEY: json.dumps({**record, "pieces": conversation.pieces})}
            save_prompt_cache(file_name, conversation.caches, metadata)
        else:
            _write_json(Path(file_name), record)
    except OSError as error:
        raise OSError(f"{file_name} cannot be written: {error.strerror or error}") from error


def _write_json(path: Path, record: dict[str, Any]) -> None:
    text = json.dumps(record, indent=1, ensure_ascii=False)
    with replaced_file(path) as part:
        # What is no Unicode, as a terminal can send it, becomes an escape of JSON.
        part.write_bytes(text.encode("utf-8", "backslashreplace"))


def load(conversation: Conversation, file_name: str, pair: dict[str, str]) -> bool:
    """Continue what save wrote; return whether its caches are in use, otherwise the next turn reads everything again.

    pair: names that caches must have been saved with. Raises OSError, or ValueError that names the file, if they were
    not, or if the file holds no conversation; the conversation is then as it was before.
    """
    if not file_name.endswith(CACHE_SUFFIX):
        _resume(conversation, _checked(read_json(Path(file_name)), file_name))
        return False
    caches, metadata = load_prompt_cache(file_name, return_metadata=True)
    if _KEY not in metadata:
        raise ValueError(
            f"{file_name} has caches, but no record of a conversation; a chat can continue only what a chat saved"
        )
    for name, expected in pair.items():
        if metadata.get(name) != expected:
            raise ValueError(
                f"{file_name} was saved with the {name} {told(metadata.get(name))[1:-1]}, this chat has {expected}"
            )
    try:
        record = parse_json(metadata[_KEY])
    except ValueError as error:
        raise ValueError(f"{file_name}: its record of a conversation is not valid JSON: {error}") from error
    pieces = _checked(record, file_name).get("pieces")
    if not isinstance(pieces, list) or not all(_is_piece(piece) for piece in pieces):
        raise ValueError(f"{file_name}: expected pieces, a list of pairs of text and token ids, got {told(pieces)}")
    if not covers(caches, sum(len(tokens) for _, tokens in pieces)):
        raise ValueError(f"{file_name} has caches that do not cover the text of its conversation")
    _resume(conversation, record)
    if record.get("drafting") != conversation.drafting or len(caches) != len(conversation.caches):
        return False
    conversation.caches, conversation.pieces = caches, [(text, tokens) for text, tokens in pieces]
    return True


def _is_piece(value: Any) -> bool:
    return (
        isinstance(value, list)
        and [type(part) for part in value] == [str, list]
        and all(type(token) is int and 0 <= token < 2**31 for token in value[1])
    )


def _checked(record: Any, file_name: str) -> dict[str, Any]:
    """Return a record of messages. Raises ValueError that names the file for anything else."""
    record = record if isinstance(record, dict) else {}
    messages, system = record.get("messages"), record.get("system")
    if not isinstance(messages, list) or not all(
        isinstance(message, dict) and all(isinstance(message.get(key), str) for key in ("role", "content"))
        for message in messages
    ):
        raise ValueError(
            f"{file_name}: expected a saved conversation: an object with the key 'messages', a list of objects with "
            "role and content, both text"
        )
    if system is not None and not isinstance(system, str):
        raise ValueError(f"{file_name}: the system message must be text, got {told(system)}")
    return record


def _resume(conversation: Conversation, record: dict[str, Any]) -> None:
    """Give a conversation the messages of a record, and empty caches."""
    conversation.reset()
    conversation.messages, conversation.system = record["messages"], record.get("system")
