"""Reads the calls of tools that a model wrote, and refuses text that is no call.

Knows mlx-lm's parsers, which raise whatever their code meets, and the API's shape of a call; knows nothing of answers.
"""

import json
import uuid
from collections.abc import Callable
from typing import Any

from ..files.json_text import parse_json

# What a parser raises for text that another model family, or a confused one, would write.
_PARSER_ERRORS = (ValueError, TypeError, LookupError, AttributeError, SyntaxError, RecursionError, MemoryError)


def read_calls(text: str, parser: Callable[[str, Any], Any], tools: list[dict] | None) -> list[dict]:
    """Return the calls that a text makes, as the API writes them. Raises ValueError if it is not calls of functions.

    parser: one of mlx-lm's tool parsers. tools: what the request offers.
    """
    try:
        parsed = parser(text, tools)
    except _PARSER_ERRORS as error:
        raise ValueError(f"the parser of tool calls raised {type(error).__name__}: {error}") from error
    calls = parsed if isinstance(parsed, list) else [parsed]
    if not calls:
        raise ValueError("the text has no tool call")
    return [_call(call) for call in calls]


def _call(call: Any) -> dict:
    if not isinstance(call, dict) or not isinstance(call.get("name"), str) or not call["name"]:
        raise ValueError(f"a tool call must be an object with a name, got {call!r}")
    id = call.get("id")
    return {
        "id": id if isinstance(id, str) and id else str(uuid.uuid4()),
        "type": "function",
        "function": {"name": call["name"], "arguments": _arguments(call.get("arguments"))},
    }


def _arguments(arguments: Any) -> str:
    """Return arguments as JSON text; a model may have written them as such text already."""
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    value = parse_json(text)
    if not isinstance(value, dict):
        raise ValueError(f"the arguments of a tool call must be an object, got {text}")
    return text
