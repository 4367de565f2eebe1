"""JSON out of files that anybody may have written. Knows text; knows nothing of what it means."""

import json
from pathlib import Path
from typing import Any

_DEPTH = 100  # of objects and lists inside one another: whatever walks the value later can do so by recursion


def parse_json(text: str | bytes, is_unique: bool = False) -> Any:
    """Return the value that a text holds. is_unique: refuse an object that has a key twice.

    Raises ValueError, whose text names no file, for anything else than JSON in UTF-8 and for JSON that is too deep.
    """
    try:
        text = text.decode() if isinstance(text, bytes) else text
        value = json.loads(text, object_pairs_hook=_unique if is_unique else None)
    except RecursionError:
        value = None
    else:
        if not _is_deep(value):
            return value
    raise ValueError(f"lists and objects are nested more than {_DEPTH} deep")


def read_json(file: Path) -> dict[str, Any]:
    """Read a JSON object. Raises ValueError that names the file for anything else."""
    try:
        content = parse_json(file.read_bytes())
    except ValueError as error:
        raise ValueError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{file} must hold a JSON object, got {type(content).__name__}")
    return content


def told(value: Any) -> str:
    """Return a value as it is written in a message of one line, cut off where it is long."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"{told(key)} stands there twice")
        found[key] = value
    return found


def _is_deep(value: Any) -> bool:
    level = [value]
    for _ in range(_DEPTH):
        level = [
            child
            for item in level
            if isinstance(item, (dict, list))
            for child in (item.values() if isinstance(item, dict) else item)
        ]
        if not level:
            return False
    return True
