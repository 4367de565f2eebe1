"""Token-by-token emission of a session, which leaves the caches at exactly the emitted text.

A round adds several tokens at once, but the caller takes them one by one and may stop after any of them.
Knows sessions and their rounds; knows nothing of how a round decides.
"""

import sys
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from .caches.lease import Lease
from .host import read_id
from .session import Session

_CLEAR_EVERY = 256  # tokens, as mlx-lm does


@dataclass(frozen=True)
class Emission:
    """One token of the text. logprobs: (V,), of the target. finish_reason: None, "stop" or "length"."""

    token: int
    logprobs: mx.array
    from_draft: bool
    finish_reason: str | None


def emit(session: Session, prompt: mx.array, **prefill: Any) -> Generator[Emission, None, None]:
    """Emit the target's tokens after prompt (P,), one by one. prefill: see Session.rounds.

    However the iteration ends, the caches then cover the prompt and exactly the emitted tokens. Where the session
    does not settle them, the last token may be missing. An exception thrown in takes back the token that was yielded
    last. A run that ends in a foreign thread leaves its caches refused, until its own thread uses them again.
    Raises ValueError if another run uses the caches, or used them since the session was made.
    """
    target, drafter = session.target, session.drafter
    lease = Lease(target.caches)
    if target.length != drafter.context_length:
        lease.end(lambda: None)
        raise ValueError(
            f"the prompt cache covered {target.length} tokens when this run was made, now the draft's context covers "
            f"{drafter.context_length}: another run used the cache since"
        )
    covered, last = target.length + prompt.size, read_id(prompt[-1])
    try:
        for latest in session.rounds(prompt, **prefill):
            verdict = latest.verdict
            for i, token in enumerate(verdict.tokens):
                is_last = i == verdict.num_accepted
                before, (covered, last) = (covered, last), (covered + 1, token)
                try:
                    yield Emission(token, latest.logprobs[i], not is_last, verdict.finish_reason if is_last else None)
                except GeneratorExit:
                    raise
                except BaseException:
                    covered, last = before  # thrown in by a caller that could not pass the token on
                    raise
            if covered // _CLEAR_EVERY > (covered - len(verdict.tokens)) // _CLEAR_EVERY:
                mx.clear_cache()
    finally:
        # At the end of the process, whoever forgot to close this needs no caches, and MLX may be gone.
        if not sys.is_finalizing():
            if lease.is_here:
                session.dice.end(covered)
            lease.end(lambda: _leave(session, covered, last))


def _leave(session: Session, covered: int, last: int) -> None:
    with mx.stream(session.stream):
        session.leave(covered, last)
