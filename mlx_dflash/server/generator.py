"""Makes the tokens of one request, with the prompt cache before and after it.

Knows tokens, chat templates and caches; knows nothing of threads or HTTP: it tells a job what happens, in this order:
Start, numbers of prompt tokens (done, total), a Token for each token, None.
"""

import argparse
import gc
import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from jinja2 import TemplateError
from mlx_lm.models.cache import LRUPromptCache
from mlx_lm.sample_utils import make_logits_processors
from mlx_lm.server import convert_chat, process_message_content

from ..api import stream_generate
from ..caches.saved import covers, try_trim
from ..commands.flags import block_options
from ..commands.sampling import sampler
from ..stats import Stats
from .errors import ApiError, ClientGone
from .metrics import Metrics
from .provider import Provider
from .reading import Reader
from .requests import Request, make_processor
from .worker import Job


@dataclass(frozen=True)
class Start:
    """The beginning of an answer. num_prompt, num_cached: tokens. kind: what comes first, "normal" or "reasoning"."""

    num_prompt: int
    num_cached: int
    kind: str


@dataclass(frozen=True)
class Token:
    """One token of an answer, and the text that it completes.

    logprob, top: its log-probability and the likeliest tokens as (id, log-probability), if they were asked for.
    stats: of the rounds so far, None without a draft.
    """

    id: int
    text: str
    finish_reason: str | None
    logprob: float | None
    top: tuple[tuple[int, float], ...]
    stats: Stats | None


class Generator:
    """Answers one job after the other; load, answer and unload belong into one thread."""

    def __init__(self, flags: argparse.Namespace, metrics: Metrics):
        self.provider, self._metrics, self._flags = Provider(flags), metrics, flags
        self._block = block_options(flags)
        self._reader: Reader | None = None
        self.prompt_cache = LRUPromptCache(flags.prompt_cache_size, flags.prompt_cache_bytes)

    def load(self) -> None:
        """Load the pair. Raises what Provider.load raises."""
        self.provider.load()
        self._reader = Reader(self.provider.model, self.provider.draft, self._flags.prefill_step_size)

    def unload(self) -> None:
        """Release everything that holds arrays."""
        self.provider.unload()
        self._reader = None
        self.prompt_cache.trim_to(n_sequences=0)
        gc.collect()
        # Without this, the process aborts at its end: the thread is gone, and the threads of its streams are not.
        mx.synchronize()
        mx.clear_streams()

    def answer(self, job: Job) -> None:
        """Generate the answer to a job and tell it the events. Raises ApiError, or ClientGone if nobody waits."""
        if job.is_gone:
            raise ClientGone
        request = job.request
        prompt, kind = self._prompt(request)
        max_tokens = self._tokens_left(len(prompt), request)
        cache, num_cached = self._cached(prompt)
        # The prompt is read up to its last token here, so the processors see it as if a cache had covered it.
        options = dict(
            stop_strings=request.stop,
            sampler=sampler(self.provider.tokenizer, **request.sampling),
            logits_processors=self._processors(request, kind, prompt[:-1]),
            **self._block_of(request),
        )
        start = Start(len(prompt), num_cached, kind)
        job.tell(start)
        self._read(job, prompt[:-1], num_cached, cache)
        if request.seed is not None:
            mx.random.seed(request.seed)
        responses = stream_generate(
            self.provider.model,
            self.provider.tokenizer,
            prompt[-1:],
            max_tokens,
            self.provider.draft,
            prompt_cache=cache,
            **options,
        )
        self.prompt_cache.insert_cache(self.provider.name, prompt + self._tell(job, start, responses), cache)

    def _read(self, job: Job, prompt: list[int], num_cached: int, cache: list[Any]) -> None:
        """Read what the cache does not cover yet. What was read before the client left is kept for its next try."""
        num_read, total, started = 0, len(prompt) - num_cached, time.perf_counter()

        def progress(done: int) -> None:
            nonlocal num_read
            num_read = done
            if job.is_gone:
                raise ClientGone
            job.tell((done, total))

        if not total:
            return
        try:
            progress(0)
            self._reader.read(prompt[num_cached:], cache, progress)
        except ClientGone:
            self._metrics.count_answer(len(prompt), num_cached, 0, None, 0)
            if covered := prompt[: num_cached + num_read]:
                self.prompt_cache.insert_cache(self.provider.name, covered, cache)
            raise
        finally:
            self._metrics.add("prefill_seconds_total", time.perf_counter() - started)

    def _tell(self, job: Job, start: Start, responses: Iterator[Any]) -> list[int]:
        """Tell the job its tokens until the last one, or until nobody waits for more. Returns them."""
        tokens, token, started = [], None, time.perf_counter()
        try:
            for response in responses:
                if not tokens:
                    started = time.perf_counter()
                tokens.append(response.token)
                token = _token(response, job.request)
                job.tell(token)
                if job.is_gone:
                    break
            # The client need not wait until closing has put the caches in order.
            job.tell(None)
        finally:
            seconds, stats = time.perf_counter() - started, token and token.stats
            self._metrics.count_answer(start.num_prompt, start.num_cached, len(tokens), stats, seconds)
            responses.close()
        if token is not None and token.finish_reason is None:
            self._metrics.add("clients_gone_total")
        return tokens

    def _block_of(self, request: Request) -> dict[str, Any]:
        """The block size that the request asks for, or else the flags."""
        if self.provider.draft is None or request.num_draft_tokens is None:
            return self._block
        return {"num_draft_tokens": request.num_draft_tokens}

    def _prompt(self, request: Request) -> tuple[list[int], str]:
        """Return the prompt's ids, and the kind of text that the answer begins with: "normal" or "reasoning"."""
        tokenizer = self.provider.tokenizer
        try:
            if not request.is_chat:
                return list(tokenizer.encode(request.prompt)), "normal"
            if not tokenizer.has_chat_template:
                return list(tokenizer.encode(convert_chat(request.messages, request.role_mapping))), "normal"
            process_message_content(request.messages)
            # As in mlx-lm's server, an answer begins after a last message of the assistant's, too.
            options = dict(
                tools=request.tools, tokenize=True, **self._flags.chat_template_args | request.template_options
            )
            prompt = tokenizer.apply_chat_template(request.messages, add_generation_prompt=True, **options)
        except (TemplateError, ValueError, TypeError, KeyError, RecursionError) as error:
            what, field = ("the chat template cannot render these messages", "messages")
            if not request.is_chat:
                what, field = ("the tokenizer cannot read the prompt", "prompt")
            raise ApiError(400, f"{what}: {error}", field) from error
        reasons = tokenizer.has_thinking and tokenizer.rfind_think_start(prompt) > tokenizer.rfind_think_end(prompt)
        return list(prompt), tokenizer.response_initial_state or ("reasoning" if reasons else "normal")

    def _tokens_left(self, prompt_length: int, request: Request) -> int:
        """Return the tokens to generate: what was asked for, and what the model's context leaves room for."""
        field, limit = "messages" if request.is_chat else "prompt", self.provider.context_length
        if not prompt_length:
            raise ApiError(400, "the prompt has no tokens", field)
        if limit is None:
            return request.max_tokens
        if prompt_length >= limit:
            message = f"the prompt has {prompt_length} tokens; the model's context has {limit}"
            raise ApiError(400, message, field, "context_length_exceeded")
        return min(request.max_tokens, limit - prompt_length)

    def _cached(self, prompt: list[int]) -> tuple[list[Any], int]:
        """Return caches that cover a beginning of the prompt, at most all but its last token, and their length."""
        logging.debug("prompt cache: %d sequences, %.2f GB", len(self.prompt_cache), self.prompt_cache.nbytes / 1e9)
        cache, rest = self.prompt_cache.fetch_nearest_cache(self.provider.name, prompt)
        num_cached = len(prompt) - len(rest)
        if cache is not None and num_cached == len(prompt) and try_trim(cache, 1):
            num_cached -= 1
        # A window gives back only so many rows; then the cache covers something else than the prompt's beginning.
        if cache is None or num_cached == len(prompt) or not covers(cache, num_cached):
            return self.provider.make_cache(), 0
        return cache, num_cached

    def _processors(self, request: Request, kind: str, cached: list[int]) -> list[Any]:
        """Return the logits processors. They see the whole prompt, whatever part of it was cached."""
        processors = make_logits_processors(**request.penalties)
        if request.grammar is not None:
            tokenizer = self.provider.tokenizer
            after = tokenizer.think_end_tokens if kind == "reasoning" and tokenizer.has_thinking else ()
            processors.append(make_processor(request.grammar, self.provider, tuple(after)))
        return [_seeing(mx.array(cached), processor) for processor in processors] if cached else processors


def _seeing(cached: mx.array, processor: Any) -> Any:
    """Let a processor see the cached beginning of the prompt (C,) in front of the tokens that it is given."""
    return lambda tokens, logits: processor(mx.concatenate([cached, tokens]), logits)


def _token(response: Any, request: Request) -> Token:
    """Return what the job is told of a response, with the log-probabilities that were asked for."""
    logprob, top = None, ()
    if request.logprobs:
        logprob = response.logprobs[response.token].item()
    if request.top_logprobs > 0:
        best = mx.argsort(-response.logprobs)[: request.top_logprobs]
        top = tuple(zip(best.tolist(), response.logprobs[best].tolist()))
    stats = getattr(response, "stats", None)
    return Token(response.token, response.text, response.finish_reason, logprob, top, stats)
