"""Text around a session: prompts to ids, emissions to pieces of text, and the strings that end a text.

Knows tokenizers, mlx-lm's responses and a session's emissions; knows nothing of how the tokens are made.
"""

import time
from collections.abc import Generator
from dataclasses import dataclass, replace
from typing import TypeVar

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import GenerationResponse as _MlxLmResponse
from mlx_lm.generate import wired_limit
from mlx_lm.tokenizer_utils import TokenizerWrapper

from .emission import Emission
from .session import Session
from .stats import Stats

R = TypeVar("R", bound=_MlxLmResponse)


@dataclass
class GenerationResponse(_MlxLmResponse):
    """mlx-lm's response, one a token. stats: statistics of the rounds so far, None without a draft."""

    stats: Stats | None = None


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


def respond(
    model: nn.Module, tokenizer: TokenizerWrapper, session: Session, emissions: Generator, prompt_tokens: int
) -> Generator[GenerationResponse, None, None]:
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


def stop_at(
    responses: Generator[R, None, None], stop_strings: list[str], tokenizer: TokenizerWrapper
) -> Generator[R, None, None]:
    """End the text before the first stop string; hold back text that may be the beginning of one."""
    held, unseen = "", 0  # unseen: characters of `held` that the detokenizer dropped at the start of the text
    is_first = bool(stop_strings)
    try:
        for response in responses:
            if is_first and drops_space(tokenizer, response.token):
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


def drops_space(tokenizer: TokenizerWrapper, token: int) -> bool:
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
