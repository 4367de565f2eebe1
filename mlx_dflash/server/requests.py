"""Reads request bodies: each field is checked, and an error names the field that is wrong or cannot be honoured.

Knows the OpenAI API and mlx-lm's additions to it; knows nothing of HTTP or generation.
"""

import json
import math
import sys
from dataclasses import dataclass
from typing import Any

from ..commands.sampling import RANGES
from ..files.json_text import parse_json
from .errors import ApiError

_NUMBER = (int, float)
_MOST = 1e30  # magnitude of what is added to logits: a few of these still have a sum in float32
# Field: allowed types, least and greatest value.
_FIELDS: dict[str, tuple[Any, float | None, float | None]] = {
    "stream": (bool, None, None),
    "max_tokens": (int, 1, None),
    "max_completion_tokens": (int, 1, None),
    "temperature": (_NUMBER, *RANGES["temp"]),
    "top_p": (_NUMBER, *RANGES["top_p"]),
    "top_k": (int, *RANGES["top_k"]),
    "min_p": (_NUMBER, *RANGES["min_p"]),
    "num_draft_tokens": (int, 0, None),
    "repetition_penalty": (_NUMBER, 0, _MOST),
    "repetition_context_size": (int, 0, 2**31 - 1),
    "presence_penalty": (_NUMBER, -_MOST, _MOST),
    "presence_context_size": (int, 0, 2**31 - 1),
    "frequency_penalty": (_NUMBER, -_MOST, _MOST),
    "frequency_context_size": (int, 0, 2**31 - 1),
    "xtc_probability": (_NUMBER, *RANGES["xtc_probability"]),
    "xtc_threshold": (_NUMBER, *RANGES["xtc_threshold"]),
    "top_logprobs": (int, -1, 20),
    "seed": (int, 0, 2**64 - 1),
    "n": (int, 1, 1),
    "best_of": (int, 1, 1),
    "model": (str, None, None),
    "draft_model": (str, None, None),
    "adapters": (str, None, None),
    "logit_bias": (dict, None, None),
    "chat_template_kwargs": (dict, None, None),
    "role_mapping": (dict, None, None),
    "stream_options": (dict, None, None),
    "response_format": (dict, None, None),
    "tools": (list, None, None),
    "tool_choice": (str, None, None),
    "echo": (bool, None, None),
    "parallel_tool_calls": (bool, None, None),
}
_ELSEWHERE = {"messages", "prompt", "stop", "logprobs", "suffix"}
# These fields cannot change an answer here.
_WITHOUT_EFFECT = {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"}


@dataclass(frozen=True, eq=False)
class Request:
    """A request whose fields make sense.

    is_chat: messages are given, otherwise a prompt. tools: None if no tool may be called. sampling: numbers of
    commands.sampling. penalties: arguments of mlx-lm's make_logits_processors. num_draft_tokens: None leaves it to the
    server's flags. top_logprobs: number of likeliest tokens to name. template_options: of the chat template.
    grammar: the response_format, None for free text.
    """

    is_chat: bool
    prompt: str
    messages: list[dict]
    tools: list[dict] | None
    role_mapping: dict | None
    template_options: dict[str, Any]
    stop: list[str]
    max_tokens: int
    seed: int | None
    sampling: dict[str, float]
    penalties: dict[str, Any]
    num_draft_tokens: int | None
    logprobs: bool
    top_logprobs: int
    grammar: dict | None
    stream: bool
    include_usage: bool


def read_request(body: Any, is_chat: bool, provider: Any) -> Request:
    """Check a request's body. provider: the served pair, and the flags with the defaults. Raises ApiError."""
    if not isinstance(body, dict):
        raise ApiError(400, f"the body must be a JSON object, got {type(body).__name__}")
    body = {name: value for name, value in body.items() if value is not None}
    for name, value in body.items():
        _check_field(name, value)
        _check_inside(name, value)
    _check_names(body, provider)
    stop, options = _stop(body), body.get("stream_options", {})
    if set(options) - {"include_usage", "include_obfuscation"}:
        raise ApiError(400, "stream_options can have include_usage only", "stream_options")
    prompt, messages = ("", _messages(body)) if is_chat else (_prompt(body), [])
    tools, grammar = _tools(body, provider), _grammar(body, provider)
    max_tokens = _max_tokens(body, provider.flags)
    logprobs, top_logprobs = _logprobs(body)
    return Request(
        is_chat=is_chat,
        prompt=prompt,
        messages=messages,
        tools=tools,
        role_mapping=body.get("role_mapping"),
        template_options=body.get("chat_template_kwargs", {}),
        stop=stop,
        max_tokens=max_tokens,
        seed=body.get("seed"),
        sampling=_sampling(body, provider),
        penalties=_penalties(body, provider),
        num_draft_tokens=body.get("num_draft_tokens"),
        logprobs=logprobs,
        top_logprobs=top_logprobs,
        grammar=grammar,
        stream=body.get("stream", False),
        include_usage=bool(options.get("include_usage", False)),
    )


def _check_field(name: str, value: Any) -> None:
    if name in _ELSEWHERE or name in _WITHOUT_EFFECT:
        return
    if name not in _FIELDS:
        raise ApiError(400, f"this server does not know the field {name}", name, "unknown_parameter")
    kinds, low, high = _FIELDS[name]
    kinds = kinds if isinstance(kinds, tuple) else (kinds,)
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        raise ApiError(
            400, f"{name} must be of type {' or '.join(k.__name__ for k in kinds)}, got {type(value).__name__}", name
        )
    low = -math.inf if low is None else low
    high = math.inf if high is None else high
    if isinstance(value, _NUMBER) and not low <= value <= high:
        bounds = f"at least {low}" if high == math.inf else f"from {low} to {high}"
        raise ApiError(400, f"{name} must be {bounds}, got {value}", name)


def _check_inside(field: str, value: Any) -> None:
    """Raise ApiError for a number that is not finite and for text that is not Unicode, however deep in a field."""
    rest = [value]
    while rest:
        value = rest.pop()
        if isinstance(value, dict):
            rest += [*value.keys(), *value.values()]
        elif isinstance(value, list):
            rest += value
        elif isinstance(value, str):
            if broken := next((c for c in value if "\ud800" <= c <= "\udfff"), None):
                message = f"{field} has the character U+{ord(broken):04X}, which is half of a surrogate pair"
                raise ApiError(400, message, field)
        elif isinstance(value, _NUMBER) and not abs(value) <= sys.float_info.max:
            raise ApiError(400, f"{field} has a number that is not finite", field)


def _check_names(body: dict, provider: Any) -> None:
    """Only the pair that was loaded is served."""
    for name, known in (
        ("model", {"default_model", provider.name}),
        ("draft_model", {"default_model", provider.flags.draft_model}),
    ):
        if name in body and body[name] not in known:
            raise ApiError(
                404, f"this server serves {provider.name}, not the {name} {body[name]}", name, "model_not_found"
            )
    if "adapters" in body and body["adapters"] != provider.flags.adapter_path:
        raise ApiError(400, "adapters cannot be changed by a request", "adapters")
    if body.get("num_draft_tokens", 0) > provider.most_drafts:
        raise ApiError(
            400,
            f"num_draft_tokens must be at most {provider.most_drafts}, got {body['num_draft_tokens']}",
            "num_draft_tokens",
        )
    for name, only in (("echo", False), ("parallel_tool_calls", True)):
        if body.get(name, only) is not only:
            raise ApiError(400, f"{name} can only be {json.dumps(only)}", name)
    if "suffix" in body:
        raise ApiError(400, "suffix is not supported", "suffix")


def _prompt(body: dict) -> str:
    prompt = body.get("prompt")
    if not isinstance(prompt, str) or not prompt:
        raise ApiError(400, "prompt must be a string that is not empty", "prompt")
    return prompt


def _messages(body: dict) -> list[dict]:
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise ApiError(400, "messages must be a list of at least one message", "messages")
    for i, message in enumerate(messages):
        where = f"messages[{i}]"
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ApiError(400, f"{where} must be an object with a role", where)
        content = message.get("content")
        if isinstance(content, list):
            for part in content:
                if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
                    raise ApiError(400, f"{where}.content can have parts of type text only", f"{where}.content")
        elif not isinstance(content, str | None):
            raise ApiError(400, f"{where}.content must be a string or a list of parts", f"{where}.content")
        calls = message.get("tool_calls") or []
        if not isinstance(calls, list) or not all(
            isinstance(c, dict) and isinstance(c.get("function", {}), dict) for c in calls
        ):
            raise ApiError(400, f"{where}.tool_calls must be a list of calls with a function", f"{where}.tool_calls")
        for call in calls:
            arguments = call.get("function", {}).get("arguments")
            try:
                value = parse_json(arguments) if isinstance(arguments, str) and arguments else None
            except ValueError as error:
                raise ApiError(
                    400, f"{where}.tool_calls has arguments that are no JSON: {error}", f"{where}.tool_calls"
                ) from error
            _check_inside(f"{where}.tool_calls", value)
    return messages


def _tools(body: dict, provider: Any) -> list | None:
    tools, choice = body.get("tools"), body.get("tool_choice", "auto")
    if choice not in ("auto", "none"):
        raise ApiError(400, f"tool_choice can be auto or none, got {choice}", "tool_choice")
    if not tools or choice == "none":
        return None
    if not all(
        isinstance(t, dict) and isinstance(t.get("function"), dict) and isinstance(t["function"].get("name"), str)
        for t in tools
    ):
        raise ApiError(400, "tools must be a list of objects with a function and its name", "tools")
    if not provider.tokenizer.has_tool_calling:
        raise ApiError(400, f"{provider.name} has no tool calling", "tools")
    return tools


def _grammar(body: dict, provider: Any) -> dict | None:
    """response_format, checked by building its grammar once. None for free text."""
    wanted = body.get("response_format", {"type": "text"})
    if wanted.get("type") == "text":
        return None
    try:
        make_processor(wanted, provider)
    except ValueError as error:
        raise ApiError(400, str(error), "response_format") from error
    return wanted


def make_processor(wanted: dict, provider: Any, after: tuple[int, ...] = ()) -> Any:
    """The logits processor of a response_format. Raises ValueError for one that makes no sense."""
    kind, grammars = wanted.get("type"), provider.grammars
    if kind == "json_object":
        return grammars.json_object(after)
    if kind == "json_schema":
        schema = wanted.get("json_schema")
        if not isinstance(schema, dict) or not isinstance(schema.get("schema"), dict):
            raise ValueError("response_format.json_schema must be an object with the key schema, an object")
        return grammars.json_schema(schema["schema"], after)
    if kind in ("regex", "lark"):
        if not isinstance(wanted.get(kind), str):
            raise ValueError(f"response_format.{kind} must be a string")
        return (grammars.regex if kind == "regex" else grammars.lark)(wanted[kind], after)
    raise ValueError(f"response_format.type must be text, json_object, json_schema, regex or lark, got {kind!r}")


def _stop(body: dict) -> list[str]:
    stop = body.get("stop", [])
    stop = [stop] if isinstance(stop, str) else stop
    if not isinstance(stop, list) or not all(isinstance(s, str) and s for s in stop):
        raise ApiError(400, "stop must be a string or a list of strings, none of them empty", "stop")
    return stop


def _max_tokens(body: dict, flags: Any) -> int:
    limit = flags.max_tokens_limit
    field = "max_completion_tokens" if "max_completion_tokens" in body else "max_tokens"
    max_tokens = body.get(field, min(flags.max_tokens, limit))
    if max_tokens > limit:
        raise ApiError(400, f"{field} must be at most {limit}, got {max_tokens}", field)
    return max_tokens


def _logprobs(body: dict) -> tuple[bool, int]:
    """Return whether log-probabilities are asked for, and the number of likeliest tokens to name."""
    logprobs, top = body.get("logprobs", False), body.get("top_logprobs", -1)
    if not isinstance(logprobs, bool):
        if not isinstance(logprobs, int) or "prompt" not in body or not 0 <= logprobs <= 20:
            message = "logprobs must be true or false, or, for a completion, a number from 0 to 20"
            raise ApiError(400, message, "logprobs")
        logprobs, top = True, logprobs
    if top > 0 and not logprobs:
        raise ApiError(400, "top_logprobs needs logprobs", "top_logprobs")
    return logprobs, top


def _sampling(body: dict, provider: Any) -> dict[str, float]:
    flags, top_k = provider.flags, body.get("top_k", provider.flags.top_k)
    return {
        "temp": body.get("temperature", flags.temp),
        "top_k": top_k if top_k < provider.vocab_size else 0,  # the whole vocabulary leaves nothing out
        **{name: body.get(name, getattr(flags, name)) for name in ("top_p", "min_p")},
        "xtc_probability": body.get("xtc_probability", 0.0),
        "xtc_threshold": body.get("xtc_threshold", 0.1),
    }


def _penalties(body: dict, provider: Any) -> dict[str, Any]:
    penalties: dict[str, Any] = {"logit_bias": _logit_bias(body, provider)}
    if 0 < body.get("repetition_penalty", 0) < 1 / _MOST:
        raise ApiError(400, f"repetition_penalty must be 0, or from {1 / _MOST} to {_MOST}", "repetition_penalty")
    for kind in ("repetition", "presence", "frequency"):
        penalties[f"{kind}_penalty"] = body.get(f"{kind}_penalty", 0.0)
        penalties[f"{kind}_context_size"] = body.get(f"{kind}_context_size", 20)
    return penalties


def _logit_bias(body: dict, provider: Any) -> dict[int, float] | None:
    if "logit_bias" not in body:
        return None
    try:
        bias = {int(token): float(value) for token, value in body["logit_bias"].items()}
    except (TypeError, ValueError):
        raise ApiError(400, "logit_bias must map token ids to numbers", "logit_bias") from None
    if not all(abs(value) <= _MOST for value in bias.values()):
        raise ApiError(400, f"logit_bias must have values from {-_MOST} to {_MOST}", "logit_bias")
    size = provider.vocab_size
    if not all(0 <= token < size for token in bias):
        raise ApiError(400, f"logit_bias must map token ids from 0 to {size - 1}", "logit_bias")
    return bias
