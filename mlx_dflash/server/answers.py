"""Response bodies out: an answer's text, reasoning, tool calls, log-probabilities and usage, whole or in chunks.

Knows the OpenAI API's shapes and mlx-lm's state machine of text; knows nothing of HTTP or generation.
"""

import time
import uuid
from typing import Any

from mlx_lm.generate import TextStateMachine
from mlx_lm.server import GenerationArguments, Response, ToolCallFormatter

from .requests import Request


class Answer:
    """One answer as it grows. take adds a token; chunk gives what is new since the last; whole gives all of it."""

    def __init__(self, request: Request, args: GenerationArguments, context: Any, provider: Any, fingerprint: str):
        self._request, self._args, self._context, self._provider = request, args, context, provider
        self._is_chat = request.request_type == "chat"
        self._head = {
            "id": f"{'chatcmpl' if self._is_chat else 'cmpl'}-{uuid.uuid4()}",
            "system_fingerprint": fingerprint,
            "object": ("chat.completion.chunk" if request.stream else "chat.completion")
            if self._is_chat
            else "text_completion",
            "model": provider.name,
            "created": int(time.time()),
        }
        self._format_tools = ToolCallFormatter(context.tool_parser, request.tools, request.stream)
        self._state = context.text_sm.make_state(context.initial_state)
        self._kind = context.initial_state
        self._num_tokens, self._num_characters, self._made_call = 0, 0, False
        self._finish_reason = None
        self._call = ""
        self._clear()

    def _clear(self) -> None:
        self._text, self._reasoning = "", ""
        self._calls: list[str] = []
        self._logprobs: list[dict] = []

    def take(self, response: Response) -> None:
        """Add one token's text."""
        self._num_tokens += 1
        self._state, segments = TextStateMachine.split(self._state, response.text)
        if response.finish_reason is not None:
            self._state, rest, kind = TextStateMachine.flush(self._state)
            segments.append((kind, rest))
            self._finish_reason = response.finish_reason
        for kind, text in segments:
            if self._kind == "tool" and kind != "tool":
                self._end_call()
            if kind == "reasoning":
                self._reasoning += text
            elif kind == "tool":
                self._call += text
            else:
                self._text += text
            self._kind = kind
        if response.finish_reason is not None:
            self._end_call()
        if self._args.logprobs:
            self._logprobs.append(self._logprob(response))

    def _end_call(self) -> None:
        if self._call:
            self._calls.append(self._call)
            self._call, self._made_call = "", True

    @property
    def has_news(self) -> bool:
        return bool(self._text or self._reasoning or self._calls)

    def chunk(self, is_last: bool = False) -> dict:
        """What is new, as a chunk of a stream."""
        choice = self._choice(self._finish() if is_last else None, "delta")
        body = {**self._head, "choices": [choice]}
        if self._request.include_usage:
            body["usage"] = None
        self._clear()
        return body

    def usage_chunk(self) -> dict:
        return {**self._head, "choices": [], "usage": self.usage()}

    def whole(self) -> dict:
        """The answer in one body."""
        return {**self._head, "choices": [self._choice(self._finish(), "message")], "usage": self.usage()}

    def _finish(self) -> str:
        reason = self._finish_reason or "stop"
        return "tool_calls" if self._made_call and reason == "stop" else reason

    def _choice(self, finish_reason: str | None, key: str) -> dict:
        choice: dict[str, Any] = {"index": 0, "finish_reason": finish_reason}
        if not self._is_chat:
            choice["text"] = self._text
        else:
            message: dict[str, Any] = {"role": "assistant"}
            if key == "message":
                message["content"] = self._text or None
            elif self._text:
                message["content"] = self._text
            if self._reasoning:
                message["reasoning"] = self._reasoning
            if self._calls:
                message["tool_calls"] = self._format_tools(self._calls)
            choice[key] = message
        if self._args.logprobs:
            choice["logprobs"] = {"content": self._logprobs} if self._is_chat else self._completion_logprobs()
        return choice

    def usage(self) -> dict:
        """Token counts; drafts that the target kept and refused in OpenAI's names, and what they were worth."""
        num_prompt = len(self._context.prompt)
        usage = {
            "prompt_tokens": num_prompt,
            "completion_tokens": self._num_tokens,
            "total_tokens": num_prompt + self._num_tokens,
            "prompt_tokens_details": {"cached_tokens": self._context.prompt_cache_count},
        }
        stats = self._context.stats
        if stats is not None:
            usage["completion_tokens_details"] = {
                "accepted_prediction_tokens": stats.num_accepted,
                "rejected_prediction_tokens": stats.num_drafted - stats.num_accepted,
                "rounds": stats.num_rounds,
                "acceptance_length": round(stats.acceptance_length, 3),
            }
        return usage

    # Log-probabilities.

    def _logprob(self, response: Response) -> dict:
        top = [self._token(id, logprob) for id, logprob in response.top_tokens]
        return {**self._token(response.token, response.logprob), "top_logprobs": top}

    def _token(self, id: int, logprob: float) -> dict:
        text = self._provider.tokenizer.decode([id])
        # Part of a character has no text of its own.
        return {
            "id": id,
            "token": text,
            "bytes": None if "\ufffd" in text else list(text.encode()),
            "logprob": max(logprob, -9999.0),
        }

    def _completion_logprobs(self) -> dict:
        """The older shape, of /v1/completions."""
        offsets = []
        for entry in self._logprobs:
            offsets.append(self._num_characters)
            self._num_characters += len(entry["token"])
        return {
            "tokens": [entry["token"] for entry in self._logprobs],
            "token_logprobs": [entry["logprob"] for entry in self._logprobs],
            "top_logprobs": [{t["token"]: t["logprob"] for t in entry["top_logprobs"]} for entry in self._logprobs],
            "text_offset": offsets,
            "content": self._logprobs,
        }
