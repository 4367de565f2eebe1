"""Writes response bodies: text, reasoning, tool calls, log-probabilities and usage of an answer, whole or in chunks.

Knows the shapes of the OpenAI API; knows nothing of HTTP or of how tokens are made.
"""

import logging
import math
import time
import uuid
from typing import Any

from ..commands.answers import AnswerParts
from ..text import drops_space
from .errors import ClientGone
from .generator import Start, Token
from .provider import Provider
from .requests import Request
from .token_texts import Offsets
from .tool_calls import read_calls


class Answer:
    """One answer as it grows. take adds a token; chunk returns what is new since the last chunk; whole returns all."""

    def __init__(self, request: Request, start: Start, provider: Provider, fingerprint: str):
        self._request, self._start, self._tokenizer = request, start, provider.tokenizer
        chat_object = "chat.completion.chunk" if request.stream else "chat.completion"
        self._head = {
            "id": f"{'chatcmpl' if request.is_chat else 'cmpl'}-{uuid.uuid4()}",
            "system_fingerprint": fingerprint,
            "object": chat_object if request.is_chat else "text_completion",
            "model": provider.name,
            "created": int(time.time()),
        }
        self._parts, self._kind = AnswerParts(provider.tokenizer, start.kind), start.kind
        self._num_tokens, self._num_calls = 0, 0
        self._stats = self._finish_reason = None
        self._texts = provider.token_texts if request.logprobs else None
        self._offsets: Offsets | None = None  # of the tokens whose log-probabilities were returned
        self._has_begun = False  # whether a part of the message was returned
        self._call = ""  # the text of a tool call that has not ended
        self._clear()

    def _clear(self) -> None:
        self._text, self._reasoning = "", ""
        self._calls: list[dict] = []
        self._logprobs: list[dict] = []

    def take(self, token: Token) -> None:
        """Add one token and its text."""
        self._num_tokens += 1
        self._stats, self._finish_reason = token.stats, token.finish_reason
        is_last = token.finish_reason is not None
        if not self._request.is_chat:
            self._text += token.text
        else:
            for kind, text in self._parts.take(token.text, is_last):
                self._take_part(kind, text)
            if is_last and self._kind == "tool":
                self._end_call()
        if self._request.logprobs:
            self._logprobs.append(self._logprob(token))

    def _take_part(self, kind: str, text: str) -> None:
        if self._kind == "tool" and kind != "tool":
            self._end_call(self._tokenizer.tool_call_end or "")
        elif kind == "tool" and self._kind != "tool":
            self._call = ""
        self._kind = kind
        if kind == "reasoning":
            self._reasoning += text
        elif kind == "tool":
            self._call += text
        else:
            self._text += text

    def _end_call(self, end: str = "") -> None:
        """Read the call; text that makes none belongs to the content, with its marks. end: the mark that ended it."""
        try:
            calls = read_calls(self._call, self._tokenizer.tool_parser, self._request.tools)
        except ValueError as error:
            logging.info("text between the marks of a tool call stays content: %.200s", error)
            self._text += f"{self._tokenizer.tool_call_start or ''}{self._call}{end}"
            return
        if self._request.stream:
            calls = [{"index": self._num_calls + i, **call} for i, call in enumerate(calls)]
        self._calls += calls
        self._num_calls += len(calls)

    @property
    def has_news(self) -> bool:
        """Whether a chunk would have any text or tool call."""
        return bool(self._text or self._reasoning or self._calls)

    def chunk(self, is_last: bool = False) -> dict:
        """Return what is new, as a chunk of a stream."""
        choice = self._choice(self._finish() if is_last else None, "delta")
        body = {**self._head, "choices": [choice]}
        if self._request.include_usage:
            body["usage"] = None
        self._clear()
        return body

    def summary(self) -> str:
        """Return what the log says of the answer."""
        start = self._start
        return (
            f"{start.num_prompt} prompt tokens ({start.num_cached} cached), {self._num_tokens} tokens, "
            f"{self._finish_reason}"
        )

    def usage_chunk(self) -> dict:
        """Return the chunk without text that ends a stream whose client asked for the usage."""
        return {**self._head, "choices": [], "usage": self.usage()}

    def whole(self) -> dict:
        """Return the answer in one body."""
        return {**self._head, "choices": [self._choice(self._finish(), "message")], "usage": self.usage()}

    def _finish(self) -> str:
        reason = self._finish_reason
        if reason is None:
            raise ClientGone  # only then does an answer end in the middle
        return "tool_calls" if self._num_calls and reason == "stop" else reason

    def _choice(self, finish_reason: str | None, key: str) -> dict:
        choice: dict[str, Any] = {"index": 0, "finish_reason": finish_reason}
        if not self._request.is_chat:
            choice["text"] = self._text
        else:
            message: dict[str, Any] = {}
            if not self._has_begun:
                # Clients put the parts of a stream together, so a role in each of them would be repeated.
                message["role"], self._has_begun = "assistant", True
            if self._text or key == "message":
                message["content"] = self._text or None
            if self._reasoning:
                message["reasoning"] = self._reasoning
            if self._calls:
                message["tool_calls"] = self._calls
            choice[key] = message
        if self._request.logprobs:
            choice["logprobs"] = {"content": self._logprobs} if self._request.is_chat else self._completion_logprobs()
        return choice

    def usage(self) -> dict:
        """Return the counts of tokens and rounds; OpenAI has names for the drafts that were kept and refused."""
        num_prompt = self._start.num_prompt
        usage = {
            "prompt_tokens": num_prompt,
            "completion_tokens": self._num_tokens,
            "total_tokens": num_prompt + self._num_tokens,
            "prompt_tokens_details": {"cached_tokens": self._start.num_cached},
        }
        stats = self._stats
        if stats is not None:
            usage["completion_tokens_details"] = {
                "accepted_prediction_tokens": stats.num_accepted,
                "rejected_prediction_tokens": stats.num_drafted - stats.num_accepted,
                "rounds": stats.num_rounds,
                "acceptance_length": round(stats.acceptance_length, 3),
            }
        return usage

    # Log-probabilities.

    def _logprob(self, token: Token) -> dict:
        top = [self._token(id, logprob) for id, logprob in token.top]
        return {**self._token(token.id, token.logprob), "top_logprobs": top}

    def _token(self, id: int, logprob: float) -> dict:
        data = self._texts.bytes_of(id)
        return {
            "id": id,
            "token": self._texts.name(id),
            "bytes": None if data is None else list(data),
            "logprob": max(logprob, -9999.0) if math.isfinite(logprob) else -9999.0,
        }

    def _completion_logprobs(self) -> dict:
        """Return the log-probabilities in the older shape, that of /v1/completions."""
        return {
            "tokens": [entry["token"] for entry in self._logprobs],
            "token_logprobs": [entry["logprob"] for entry in self._logprobs],
            "top_logprobs": [_by_name(entry["top_logprobs"]) for entry in self._logprobs],
            "text_offset": [self._offset(entry) for entry in self._logprobs],
            "content": self._logprobs,
        }

    def _offset(self, entry: dict) -> int:
        data = None if entry["bytes"] is None else bytes(entry["bytes"])
        if self._offsets is None:
            self._offsets = Offsets()
            if data is not None and drops_space(self._tokenizer, entry["id"]):
                self._offsets.add(data[1:])
                return 0
        return self._offsets.add(data)


def _by_name(top: list[dict]) -> dict[str, float]:
    """Return the log-probabilities of the likeliest tokens by their texts, or by id where two have the same text."""
    found: dict[str, float] = {}
    for token in top:
        found[f"token_id:{token['id']}" if token["token"] in found else token["token"]] = token["logprob"]
    return found
