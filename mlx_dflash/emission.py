"""Token-by-token emission of a session, which leaves the caches at exactly the emitted text.

A round adds several tokens at once, but the caller takes them one by one and may stop after any of them.
Knows sessions and their rounds; knows nothing of how a round decides.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from .session import Session

_CLEAR_EVERY = 256  # tokens, as mlx-lm does


@dataclass(frozen=True)
class Emission:
    """One token of the text. logprobs: (V,), of the target. finish_reason: None, "stop" or "length"."""

    token: int
    logprobs: mx.array
    from_draft: bool
    finish_reason: str | None


def emit(session: Session, prompt: mx.array, **prefill: Any) -> Iterator[Emission]:
    """Emit the target's tokens after prompt (P,), one by one. prefill: see Session.rounds.

    However the iteration ends, the caches then cover the prompt and exactly the emitted tokens. Where the session
    does not settle them, the last token may be missing.
    """
    covered, last = session.target.length + prompt.size, prompt[-1].item()
    try:
        for latest in session.rounds(prompt, **prefill):
            verdict = latest.verdict
            for i, token in enumerate(verdict.tokens):
                is_last = i == verdict.num_accepted
                emission = Emission(token, latest.logprobs[i], not is_last, verdict.finish_reason if is_last else None)
                covered, last = covered + 1, token
                yield emission
            if covered // _CLEAR_EVERY > (covered - len(verdict.tokens)) // _CLEAR_EVERY:
                mx.clear_cache()
    finally:
        # At the end of the process, whoever forgot to close this needs no caches, and MLX may be gone.
        if not sys.is_finalizing():
            with mx.stream(session.stream):
                session.leave(covered, last)
