"""The API of mlx-lm with a DFlash draft: text in, responses out.

Without a draft it is mlx-lm's own path. Knows text and tokenizers; the tokens come from session.py.
"""

import time
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
from mlx_lm.generate import GenerationResponse as _MlxLmResponse
from mlx_lm.generate import generation_stream, wired_limit
from mlx_lm.tokenizer_utils import TokenizerWrapper

from .caches.growing import KVQuantization
from .caches.saved import draft_entries, make_prompt_cache
from .dice import Dice, LogitsProcessor, Sampler
from .draft.model import DraftModel
from .emission import Emission, emit
from .pace import Pace
from .pair import Pair
from .session import Session
from .stats import Stats, TimedDice, TimedDrafter

_RESERVED_TOKENS = 1024  # room made at once for tokens to come; beyond it the caches grow geometrically


@dataclass
class GenerationResponse(_MlxLmResponse):
    """mlx-lm's response, one a token. stats: statistics of the rounds so far, None without a draft."""

    stats: Stats | None = None


def stream_generate(
    model: nn.Module,
    tokenizer: Any,
    prompt: str | mx.array | list[int],
    max_tokens: int = 256,
    draft_model: DraftModel | None = None,
    stream: mx.Stream | mx.ThreadLocalStream = generation_stream,
    *,
    block_size: int | str | None = None,
    num_draft_tokens: int | None = None,
    stop_strings: str | Iterable[str] = (),
    sampler: Sampler | None = None,
    logits_processors: list[LogitsProcessor] | None = None,
    prompt_cache: list[Any] | None = None,
    prefill_step_size: int = 2048,
    prompt_progress_callback: Callable[[int, int], None] | None = None,
    **mlx_lm_options,
) -> Iterator[GenerationResponse]:
    """Yield one response a token, as mlx_lm.stream_generate does; with a draft, several times sooner.

    The tokens are those of mlx_lm.stream_generate with the same arguments and the same seed.
    draft_model: a DFlash draft from load_draft; None is mlx-lm's own path. block_size: anchor and drafts of a round,
    at most the draft's own, or "auto" for what proves fastest; num_draft_tokens, mlx-lm's name, is one less.
    stop_strings: the text ends before the first of them. prompt_cache: continued, and left covering the prompt and
    every yielded token. stream: where the work is enqueued; the iteration belongs to the thread that begins it.
    mlx_lm_options: max_kv_size, kv_bits, kv_group_size, quantized_kv_start; input_embeddings, without a draft only.
    Raises ValueError for arguments that make no sense, TypeError for unknown ones, before anything is computed.
    """
    stops = [stop_strings] if isinstance(stop_strings, str) else list(stop_strings)
    if not all(isinstance(s, str) and s for s in stops):
        raise ValueError(f"stop_strings must be non-empty strings, got {stops}")
    if not isinstance(tokenizer, TokenizerWrapper):
        tokenizer = TokenizerWrapper(tokenizer)
    _check_options(mlx_lm_options, draft_model)
    block_size = _block_size(block_size, num_draft_tokens, draft_model)
    check_sizes(max_tokens, prefill_step_size)
    tokens = encode(tokenizer, prompt)
    common = dict(sampler=sampler, logits_processors=logits_processors, prompt_cache=prompt_cache)
    if draft_model is None:
        plain = mlx_lm.stream_generate(
            model,
            tokenizer,
            tokens,
            max_tokens,
            stream=stream,
            prefill_step_size=prefill_step_size,
            prompt_progress_callback=prompt_progress_callback,
            **common,
            **mlx_lm_options,
        )
        return _stop_at(plain, stops, tokenizer)
    session = open_session(
        model,
        draft_model,
        tokens,
        max_tokens,
        block_size=block_size,
        stop_tokens=tokenizer.eos_token_ids,
        stream=stream,
        **_cache_options(**mlx_lm_options),
        **common,
    )
    emissions = emit(session, tokens, step_size=prefill_step_size, progress=prompt_progress_callback or _silent)
    return _stop_at(_respond(model, tokenizer, session, emissions, tokens.size), stops, tokenizer)


def generate(
    model: nn.Module, tokenizer: Any, prompt: str | mx.array | list[int], verbose: bool = False, **kwargs
) -> str:
    """Return the whole text, as mlx_lm.generate does. kwargs: see stream_generate. verbose: print text and speed."""
    text, response = "", None
    if verbose:
        print("=" * 10)
    for response in stream_generate(model, tokenizer, prompt, **kwargs):
        text += response.text
        if verbose:
            print(response.text, end="", flush=True)
    if verbose:
        print("\n" + "=" * 10)
        print(report(response))
    return text


def report(response: GenerationResponse, with_rounds: bool = True) -> str:
    """What a run did, in a few lines, from its last response; with_rounds: also of its rounds, if it had any."""
    lines = [
        f"Prompt: {response.prompt_tokens} tokens, {response.prompt_tps:.1f} tokens-per-sec",
        f"Generation: {response.generation_tokens} tokens, {response.generation_tps:.1f} tokens-per-sec",
        f"Peak memory: {response.peak_memory:.3f} GB",
    ]
    stats = getattr(response, "stats", None)
    if with_rounds and stats is not None and stats.num_rounds:
        counts = ", ".join(f"{n}: {count}" for n, count in enumerate(stats.accepted))
        times = " ".join(
            f"{name} {1e3 * seconds / stats.num_rounds:.2f}"
            for name, seconds in (
                ("draft", stats.draft_seconds),
                ("verify", stats.verify_seconds),
                ("host", stats.host_seconds),
            )
        )
        lines += [
            f"Rounds: {stats.num_rounds}, acceptance length {stats.acceptance_length:.2f} tokens, "
            f"{100 * stats.acceptance_rate:.0f}% of drafts kept",
            f"Rounds by kept drafts: {counts}",
            f"Milliseconds a round: {times}",
        ]
    return "\n".join(lines)


def encode(tokenizer: TokenizerWrapper, prompt: str | mx.array | list[int]) -> mx.array:
    """Return the prompt's ids (P,) as mlx-lm would: a string gets special tokens unless it begins with the BOS text.

    Raises ValueError for an empty prompt or one that is not a single sequence.
    """
    if isinstance(prompt, str):
        special = tokenizer.bos_token is None or not prompt.startswith(tokenizer.bos_token)
        prompt = tokenizer.encode(prompt, add_special_tokens=special)
    tokens = prompt if isinstance(prompt, mx.array) else mx.array(prompt)
    if tokens.ndim != 1 or tokens.size == 0:
        raise ValueError(f"the prompt must be one sequence of at least one token, got shape {tokens.shape}")
    return tokens


def open_session(
    model: nn.Module,
    draft: DraftModel,
    prompt: mx.array,
    max_tokens: int = -1,
    *,
    sampler: Sampler | None = None,
    logits_processors: list[LogitsProcessor] | None = None,
    prompt_cache: list[Any] | None = None,
    max_kv_size: int | None = None,
    quantization: KVQuantization | None = None,
    block_size: int | str | None = None,
    stop_tokens: Iterable[int] = (),
    stream: mx.Stream | mx.ThreadLocalStream = generation_stream,
) -> Session:
    """Put a target, its draft and the dice together for one prompt (P,). Arguments as in stream_generate.

    quantization: of the rows that the target's caches keep. Raises ValueError, before any generation, if draft and
    target do not belong together.
    """
    pair = Pair(model, draft)
    low, high = mx.min(prompt).item(), mx.max(prompt).item()
    if low < 0 or high >= pair.structure.vocab_size:
        raise ValueError(
            f"the prompt has ids from {low} to {high}; the target's vocabulary has {pair.structure.vocab_size} tokens"
        )
    caches = make_prompt_cache(model, draft, max_kv_size) if prompt_cache is None else prompt_cache
    contexts = draft_entries(caches, model, draft)
    dice = Dice(sampler, logits_processors)
    if isinstance(block_size, str) and block_size != "auto":
        raise ValueError(f'block_size must be a number or "auto", got {block_size!r}')
    is_auto = block_size == "auto"
    drafter = pair.drafter(dice, contexts, None if is_auto else block_size)
    target = pair.target(caches, drafter.num_drafts + 1, quantization=quantization, length=drafter.context_length)
    expected = _RESERVED_TOKENS if max_tokens < 0 else min(max_tokens, _RESERVED_TOKENS)
    target.reserve(target.length + prompt.size + expected + draft.config.block_size)
    drafter.reserve(target.length + prompt.size + expected + draft.config.block_size)
    stats = Stats()
    return Session(
        target,
        TimedDrafter(drafter, stats),
        TimedDice(dice, stats),
        stop_tokens=frozenset(stop_tokens),
        max_tokens=max_tokens,
        settles=prompt_cache is not None,
        pace=Pace(drafter.num_drafts, pair.round_seconds) if is_auto else None,
        stream=stream,
        stats=stats,
    )


def _check_options(options: dict[str, Any], draft_model: DraftModel | None) -> None:
    """Refuse unknown options, and with a draft those that it does not support."""
    known = {"max_kv_size", "kv_bits", "kv_group_size", "quantized_kv_start", "input_embeddings"}
    unknown = sorted(set(options) - known)
    if unknown:
        raise TypeError(f"stream_generate() got unexpected keyword arguments: {', '.join(unknown)}")
    if draft_model is None:
        return
    if not isinstance(draft_model, DraftModel):
        raise TypeError(f"draft_model must be a DFlash draft from load_draft, got {type(draft_model).__name__}")
    if options.get("input_embeddings") is not None:
        raise ValueError("input_embeddings is not supported together with a draft")


def _cache_options(
    max_kv_size: int | None = None,
    kv_bits: int | None = None,
    kv_group_size: int = 64,
    quantized_kv_start: int = 5000,
    **_,
) -> dict[str, Any]:
    """What open_session takes for mlx-lm's options, with mlx-lm's defaults."""
    quantization = None if kv_bits is None else KVQuantization(kv_bits, kv_group_size, quantized_kv_start)
    return dict(max_kv_size=max_kv_size, quantization=quantization)


def _silent(processed: int, total: int) -> None:
    """Report no progress."""


def check_sizes(max_tokens: int, prefill_step_size: int) -> None:
    """Raise ValueError for sizes that make no sense, in the names of stream_generate."""
    if max_tokens == 0 or max_tokens < -1:
        raise ValueError(f"max_tokens must be positive, or -1 for no limit; got {max_tokens}")
    if prefill_step_size < 1:
        raise ValueError(f"prefill_step_size must be at least 1, got {prefill_step_size}")


def _block_size(block_size: int | None, num_draft_tokens: int | None, draft_model: DraftModel | None) -> int | None:
    if block_size is not None and num_draft_tokens is not None:
        raise ValueError("give block_size or num_draft_tokens, not both")
    if draft_model is None and (block_size is not None or num_draft_tokens is not None):
        raise ValueError("block_size and num_draft_tokens need a draft_model")
    return block_size if num_draft_tokens is None else num_draft_tokens + 1


def _respond(
    model: nn.Module, tokenizer: TokenizerWrapper, session: Session, emissions: Generator, prompt_tokens: int
) -> Iterator[GenerationResponse]:
    """Turn emissions into mlx-lm's responses: text as it becomes whole, none for the token that ends the text."""
    detokenizer = tokenizer.detokenizer
    started = time.perf_counter()
    prompt_tps = 0.0

    def response(n: int, emission: Emission) -> GenerationResponse:
        if emission.finish_reason != "stop":
            detokenizer.add_token(emission.token)
        if emission.finish_reason is not None:
            detokenizer.finalize()
        return GenerationResponse(
            text=detokenizer.last_segment,
            token=emission.token,
            logprobs=emission.logprobs,
            from_draft=emission.from_draft,
            prompt_tokens=prompt_tokens,
            prompt_tps=prompt_tps,
            generation_tokens=n,
            generation_tps=n / (time.perf_counter() - started),
            peak_memory=mx.get_peak_memory() / 1e9,
            finish_reason=emission.finish_reason,
            stats=session.stats,
        )

    with wired_limit(model, [session.stream]):
        try:
            for n, emission in enumerate(emissions, 1):
                if n == 1:
                    prompt_tps = prompt_tokens / (time.perf_counter() - started)
                    started = time.perf_counter()
                try:
                    told = response(n, emission)
                except BaseException as error:
                    emissions.throw(error)  # the caller never sees this token
                    raise
                yield told
        finally:
            # Not left to the garbage collector: the caches must be settled when the caller goes on.
            emissions.close()


def _stop_at(
    responses: Iterator[GenerationResponse], stop_strings: list[str], tokenizer: TokenizerWrapper
) -> Iterator[GenerationResponse]:
    """End the text before the first stop string; hold back text that may be the beginning of one."""
    held, unseen = "", 0  # unseen: characters of `held` that the detokenizer dropped at the start of the text
    is_first = bool(stop_strings)
    try:
        for response in responses:
            if is_first and _drops_space(tokenizer, response.token):
                held, unseen = " ", 1
            is_first = False
            text = held + response.text
            found = [i for i in (text.find(s) for s in stop_strings) if i >= 0]
            if found:
                yield replace(response, text=text[unseen : min(found)], finish_reason="stop")
                return
            held = "" if response.finish_reason else _possible_beginning(text, stop_strings)
            end = len(text) - len(held)
            yield replace(response, text=text[unseen:end])
            unseen = 0 if end >= unseen else unseen
    finally:
        responses.close()


def _drops_space(tokenizer: TokenizerWrapper, token: int) -> bool:
    """Whether the detokenizer leaves out the space that a token begins with where the text begins with it."""
    texts = []
    for count in (1, 2):
        detokenizer = tokenizer.detokenizer
        for _ in range(count):
            detokenizer.add_token(token)
        detokenizer.finalize()
        texts.append(detokenizer.text)
    once, twice = texts
    return not once.startswith(" ") and twice == f"{once} {once}"


def _possible_beginning(text: str, stop_strings: list[str]) -> str:
    """The longest end of text that is the beginning of a stop string."""
    ends = (
        text[-n:] for s in stop_strings for n in range(min(len(s) - 1, len(text)), 0, -1) if s.startswith(text[-n:])
    )
    return max(ends, key=len, default="")
