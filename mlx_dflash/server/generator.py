"""Makes the tokens of one request after the other, in mlx-lm's generation thread, with the prompt cache around them."""

import logging
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass
from queue import Queue
from typing import Any

import mlx.core as mx
from jinja2 import TemplateError
from mlx_lm.models.cache import LRUPromptCache
from mlx_lm.sample_utils import make_logits_processors, make_sampler
from mlx_lm.server import GenerationArguments, GenerationContext, Response, ResponseGenerator

from ..api import stream_generate
from ..caches.saved import covers, try_trim
from ..commands.flags import block_options
from ..stats import Stats
from .errors import ApiError, ClientGone
from .metrics import Metrics
from .provider import Provider
from .requests import Request, make_processor


@dataclass
class Context(GenerationContext):
    """mlx-lm's context of an answer, with the statistics of its rounds so far."""

    stats: Stats | None = None


class Generator(ResponseGenerator):
    """mlx-lm's queue and thread, our tokens. max_queue: most requests that wait, besides the one that is answered.

    loaded: done when the pair is loaded, with the error if it could not be.
    """

    def __init__(self, provider: Provider, prompt_cache: LRUPromptCache, metrics: Metrics, max_queue: int):
        self.metrics, self.max_queue, self.loaded = metrics, max_queue, Future()
        self._admitted: set[Request] = set()
        self._lock = threading.Lock()
        super().__init__(provider, prompt_cache)

    def _run_generate(self) -> None:
        try:
            # Loaded here: arrays belong to the streams of the thread that made them.
            self.model_provider.load_default()
            self.loaded.set_result(None)
            super()._run_generate()
        except (ValueError, TypeError, OSError, ModuleNotFoundError, RuntimeError) as error:
            self._generation_failed = True
            self.loaded.set_exception(error)
        finally:
            # Without this, the process aborts at its end: the thread is gone, its streams' threads are not.
            mx.synchronize()
            mx.clear_streams()

    @property
    def num_waiting(self) -> int:
        """Requests that wait or are being answered, those of clients that left not counted."""
        with self._lock:
            return sum(not request.is_gone() for request in self._admitted)

    def generate(self, request: Request, generation_args: GenerationArguments, progress_callback: Any = None):
        """As mlx-lm's. Raises ApiError when too many wait."""
        if self.num_waiting > self.max_queue:
            raise ApiError(429, f"{self.max_queue} requests are waiting already; try again later", code="queue_full")
        with self._lock:
            self._admitted.add(request)
        try:
            return super().generate(request, generation_args, progress_callback)
        finally:
            if not self.generation_available():
                raise ApiError(503, "the server cannot generate any more; see its log", code="unavailable")

    def _is_batchable(self, args: GenerationArguments) -> bool:
        return False

    def _serve_single(self, request: tuple[Queue, Request, GenerationArguments], stream: Any) -> None:
        queue, request, args = request
        try:
            with _Failures(queue, self.metrics):
                if request.is_gone():
                    raise ClientGone
                self._answer(queue, request, args, stream)
        finally:
            with self._lock:
                self._admitted.discard(request)

    def _answer(self, queue: Queue, request: Request, args: GenerationArguments, stream: Any) -> None:
        provider, tokenizer = self.model_provider, self.model_provider.tokenizer
        prompt, state = self._prompt(request, args)
        max_tokens = self._tokens_left(len(prompt), request, args)
        _, text_sm = self._make_state_machine(provider.model_key, tokenizer, [])
        cache, num_cached = self._cached(prompt)
        context = Context(
            has_tool_calling=tokenizer.has_tool_calling,
            has_thinking=tokenizer.has_thinking,
            tool_parser=tokenizer.tool_parser,
            text_sm=text_sm,
            initial_state=state,
            prompt=prompt,
            prompt_cache_count=num_cached,
        )

        def is_over() -> bool:
            return context._should_stop or request.is_gone()

        def progress(done: int, total: int) -> None:
            if is_over():
                raise ClientGone
            queue.put((done, total))

        if args.seed is not None:
            mx.random.seed(args.seed)
        responses = stream_generate(
            provider.model,
            tokenizer,
            prompt[num_cached:],
            max_tokens,
            provider.draft_model,
            stream,
            stop_strings=args.stop_words,
            sampler=_sampler(args, tokenizer),
            logits_processors=self._processors(request, args, state, prompt[:num_cached]),
            prompt_cache=cache,
            prompt_progress_callback=progress,
            prefill_step_size=self.cli_args.prefill_step_size,
            **self._block(args),
        )
        queue.put(context)
        tokens, started = [], time.perf_counter()
        try:
            for response in responses:
                if not tokens:
                    started = time.perf_counter()
                tokens.append(response.token)
                context.stats = response.stats if provider.draft_model is not None else None
                queue.put(_response(response, args))
                if is_over():
                    break
            # Not behind the closing, which puts the caches in order first.
            queue.put(None)
        finally:
            self.metrics.count_answer(
                len(prompt), num_cached, len(tokens), context.stats, time.perf_counter() - started
            )
            responses.close()
        self.prompt_cache.insert_cache(provider.model_key, prompt + tokens, cache)
        if is_over() and response.finish_reason is None:
            self.metrics.add("clients_gone_total")

    def _block(self, args: GenerationArguments) -> dict[str, Any]:
        """The block of the request, or else of the flags."""
        if self.model_provider.draft_model is not None and args.num_draft_tokens is not None:
            return {"num_draft_tokens": args.num_draft_tokens}
        return block_options(self.cli_args)

    def _prompt(self, request: Request, args: GenerationArguments) -> tuple[list[int], str]:
        """The prompt's ids, and the state in which the answer begins: "normal" or "reasoning"."""
        try:
            prompt, _, _, state, _ = self._tokenize(self.model_provider.tokenizer, request, args)
        except (TemplateError, ValueError, TypeError, KeyError) as error:
            raise ApiError(400, f"the chat template cannot render these messages: {error}", "messages") from error
        return list(prompt), state

    def _tokens_left(self, prompt_length: int, request: Request, args: GenerationArguments) -> int:
        """Tokens to generate: what was asked for, and what the model's context leaves room for."""
        field = "messages" if request.request_type == "chat" else "prompt"
        limit = self.model_provider.context_length
        if not prompt_length:
            raise ApiError(400, "the prompt has no tokens", field)
        if limit is not None and prompt_length >= limit:
            raise ApiError(
                400,
                f"the prompt has {prompt_length} tokens; the model's context has {limit}",
                field,
                "context_length_exceeded",
            )
        return args.max_tokens if limit is None else min(args.max_tokens, limit - prompt_length)

    def _cached(self, prompt: list[int]) -> tuple[list[Any], int]:
        """Caches that cover a beginning of the prompt, all but its last token at most, and the number they cover."""
        self._log_cache_stats()
        cache, rest = self.prompt_cache.fetch_nearest_cache(self.model_provider.model_key, prompt)
        num_cached = len(prompt) - len(rest)
        if cache is not None and num_cached == len(prompt) and try_trim(cache, 1):
            num_cached -= 1
        # A window gives back only so many rows; what then differs from the rest is of no use.
        if cache is None or num_cached == len(prompt) or not covers(cache, num_cached):
            return self.model_provider.make_cache(), 0
        return cache, num_cached

    def _processors(self, request: Request, args: GenerationArguments, state: str, cached: list[int]) -> list[Any]:
        """The logits processors, which see the whole prompt whatever part of it was cached."""
        logits = args.logits
        processors = make_logits_processors(
            logits.logit_bias,
            logits.repetition_penalty,
            logits.repetition_context_size,
            logits.presence_penalty,
            logits.presence_context_size,
            logits.frequency_penalty,
            logits.frequency_context_size,
        )
        if request.grammar is not None:
            tokenizer = self.model_provider.tokenizer
            after = tokenizer.think_end_tokens if state == "reasoning" and tokenizer.has_thinking else ()
            processors.append(make_processor(request.grammar, self.model_provider, tuple(after)))
        return [_seeing(mx.array(cached), processor) for processor in processors] if cached else processors


class _Failures:
    """Sends whatever goes wrong inside to the client: the thread serves everybody, and no request may end it."""

    def __init__(self, queue: Queue, metrics: Metrics):
        self._queue, self._metrics = queue, metrics

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type | None, error: BaseException | None, trace: Any) -> bool:
        if not isinstance(error, Exception):
            return False
        if isinstance(error, ClientGone):
            self._metrics.add("clients_gone_total")
        elif not isinstance(error, (ApiError, ValueError)):
            logging.error("an answer failed", exc_info=error)
            error = ApiError(500, f"the answer failed: {type(error).__name__}: {error}")
        self._queue.put(error)
        return True


def _seeing(cached: mx.array, processor: Any) -> Any:
    """The processor with the cached beginning of the prompt (C,) in front of the tokens it is given."""
    return lambda tokens, logits: processor(mx.concatenate([cached, tokens]), logits)


def _sampler(args: GenerationArguments, tokenizer: Any) -> Any:
    chosen = args.sampling
    return make_sampler(
        chosen.temperature,
        top_p=chosen.top_p,
        min_p=chosen.min_p,
        top_k=chosen.top_k,
        xtc_probability=chosen.xtc_probability,
        xtc_threshold=chosen.xtc_threshold,
        xtc_special_tokens=tokenizer.encode("\n") + list(tokenizer.eos_token_ids),
    )


def _response(response: Any, args: GenerationArguments) -> Response:
    """mlx-lm's response. top_tokens: (id, log-probability) of the likeliest tokens, if they are asked for."""
    logprob, top = None, ()
    if args.logprobs:
        logprob = response.logprobs[response.token].item()
    if args.top_logprobs > 0:
        best = mx.argsort(-response.logprobs)[: args.top_logprobs]
        top = tuple(zip(best.tolist(), response.logprobs[best].tolist()))
    return Response(response.text, response.token, logprob, response.finish_reason, top)
