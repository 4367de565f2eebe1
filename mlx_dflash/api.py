"""The API of mlx-lm with a DFlash draft: text in, responses out.

Without a draft it is mlx-lm's own path. Knows the options of mlx-lm and what they mean for a session; the rounds are
session.py's, the text is text.py's.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
from mlx_lm.generate import generation_stream
from mlx_lm.tokenizer_utils import TokenizerWrapper

from .block_size import AUTO, chosen_block_size
from .caches.quantization import KVQuantization
from .caches.saved import draft_entries, make_prompt_cache
from .dice import LogitsProcessor, Sampler
from .draft.model import DraftModel
from .emission import emit
from .host import read_ids
from .pace import Pace
from .pair import Pair
from .session import Session
from .stats import Stats, TimedDice, TimedDrafter
from .text import GenerationResponse, encode, respond, stop_at

_RESERVED_TOKENS = 1024  # room made at once for tokens to come; beyond it the caches grow geometrically


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
    block_size = chosen_block_size(block_size, num_draft_tokens, draft_model is not None)
    check_sizes(max_tokens, prefill_step_size)
    tokens = encode(tokenizer, prompt)
    common: dict[str, Any] = dict(
        sampler=sampler, logits_processors=logits_processors, prompt_cache=prompt_cache, stream=stream
    )
    if draft_model is None:
        common |= dict(prefill_step_size=prefill_step_size, prompt_progress_callback=prompt_progress_callback)
        plain: Any = mlx_lm.stream_generate(model, tokenizer, tokens, max_tokens, **common, **mlx_lm_options)
        return stop_at(plain, stops, tokenizer)
    common |= dict(block_size=block_size, stop_tokens=tokenizer.eos_token_ids, **_cache_options(**mlx_lm_options))
    session = open_session(Pair(model, draft_model), tokens, max_tokens, **common)
    emissions = emit(session, tokens, step_size=prefill_step_size, progress=prompt_progress_callback or _silent)
    return stop_at(respond(model, tokenizer, session, emissions, tokens.size), stops, tokenizer)


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
    if verbose and response is not None:
        print("\n" + "=" * 10)
        print(report(response))
    return text


def report(response: GenerationResponse, with_rounds: bool = True) -> str:
    """Describe a run in a few lines, from its last response. with_rounds: also its rounds, if it had any."""
    # One token comes with the prompt's pass; there is no time between tokens yet.
    rate = f", {response.generation_tps:.1f} tokens-per-sec" if response.generation_tokens > 1 else ""
    lines = [
        f"Prompt: {response.prompt_tokens} tokens, {response.prompt_tps:.1f} tokens-per-sec",
        f"Generation: {response.generation_tokens} token{'s' if rate else ''}{rate}",
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


def open_session(
    pair: Pair,
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
    """Put a pair and the dice together for one prompt (P,). Arguments as in stream_generate.

    quantization: of the rows that the target's caches keep. Raises ValueError, before any generation, for ids that the
    target does not have, and for a prompt cache of other models.
    """
    _check_ids(prompt, pair.structure.vocab_size)
    rows = chosen_block_size(block_size, None)
    caches = make_prompt_cache(pair.model, pair.draft, max_kv_size) if prompt_cache is None else prompt_cache
    contexts = draft_entries(caches, pair.model, pair.draft)
    stats = Stats()
    dice = TimedDice(stats, sampler, logits_processors)
    drafter = pair.drafter(dice, contexts, rows if isinstance(rows, int) else None)
    target = pair.target(caches, drafter.num_drafts + 1, quantization=quantization, length=drafter.context_length)
    expected = _RESERVED_TOKENS if max_tokens < 0 else min(max_tokens, _RESERVED_TOKENS)
    for side in (target, drafter):
        side.reserve(target.length + prompt.size + expected + pair.draft.config.block_size)
    return Session(
        target,
        TimedDrafter(drafter, stats),
        dice,
        stop_tokens=frozenset(stop_tokens),
        max_tokens=max_tokens,
        settles=prompt_cache is not None,
        pace=Pace(drafter.num_drafts, pair.round_seconds) if block_size == AUTO else None,
        stream=stream,
        stats=stats,
    )


def check_sizes(max_tokens: int, prefill_step_size: int) -> None:
    """Raise ValueError for sizes that make no sense, in the names of stream_generate."""
    if max_tokens == 0 or max_tokens < -1:
        raise ValueError(f"max_tokens must be positive, or -1 for no limit; got {max_tokens}")
    if prefill_step_size < 1:
        raise ValueError(f"prefill_step_size must be at least 1, got {prefill_step_size}")


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
    """Turn mlx-lm's options of the caches, with its defaults, into those of open_session."""
    quantization = None if kv_bits is None else KVQuantization(kv_bits, kv_group_size, quantized_kv_start)
    return dict(max_kv_size=max_kv_size, quantization=quantization)


def _check_ids(prompt: mx.array, vocab_size: int) -> None:
    ids = read_ids(prompt)
    if min(ids) < 0 or max(ids) >= vocab_size:
        raise ValueError(
            f"the prompt has ids from {min(ids)} to {max(ids)}; the target's vocabulary has {vocab_size} tokens"
        )


def _silent(processed: int, total: int) -> None:
    """Report no progress."""
