"""The moments of a session: the state after its prefill and after each of its rounds, and a moment in words.

Watches a session from outside, between its rounds; knows nothing of how a round is done or of what is printed.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from ..session import Session


@dataclass(frozen=True)
class Moment:
    """The state after the prefill, which has number 0, or after one round.

    block: the anchor and the drafts, at positions block_start, block_start + 1, ...; empty for the prefill. kept,
    next_token: how many drafts the target kept, and its own token after them. confirmed: number of tokens of prompt
    and text. target_covers, context_covers: number of tokens whose K and V the target's and the draft's caches hold.
    """

    number: int
    block: list[int]
    block_start: int
    kept: int
    next_token: int
    confirmed: int
    target_covers: int
    context_covers: int
    finish_reason: str | None


def watch(session: Session, prompt: mx.array) -> Iterator[Moment]:
    """Run a session on prompt (P,) and yield its moments, the prefill first."""
    confirmed = session.target.length + prompt.size
    for number, done in enumerate(session.rounds(prompt)):
        verdict = done.verdict
        block_start = confirmed - 1
        confirmed += len(verdict.tokens)
        yield Moment(
            number=number,
            block=[done.anchor, *done.drafts] if number else [],
            block_start=block_start,
            kept=verdict.num_accepted,
            next_token=verdict.next_token,
            confirmed=confirmed,
            target_covers=session.target.length,
            context_covers=session.drafter.context_length,
            finish_reason=verdict.finish_reason,
        )


def describe(moment: Moment, prompt_length: int, tokenizer: Any) -> str:
    """Tell a moment in a few lines of text. prompt_length: tokens."""

    def show(token: int) -> str:
        return json.dumps(tokenizer.decode([token]), ensure_ascii=False)

    covers = (
        f"  target KV covers {_span(moment.target_covers)} · draft context KV covers {_span(moment.context_covers)} · "
        f"anchor {show(moment.next_token)} at {moment.confirmed - 1} is in neither"
    )
    if not moment.block:
        return "\n".join(
            [
                f"prefill: the target reads {prompt_length} prompt tokens; "
                "their features become the draft's context K/V",
                f"  the target says {show(moment.next_token)}",
                covers,
            ]
        )
    drafts, first = moment.block[1:], moment.block_start
    kept, refused = drafts[: moment.kept], drafts[moment.kept :]
    role = "corrects" if refused else "adds"
    lines = [
        f"round {moment.number}: block at {first}..{first + len(drafts)} = "
        f"[{show(moment.block[0])}{', MASK' * len(drafts)}]; its own K/V is temporary",
        f"  draft    {' '.join(map(show, drafts)) or '(nothing left to draft)'}",
        f"  target   keeps {' '.join(map(show, kept)) or 'none'}"
        + (f", refuses {show(refused[0])}" if refused else "")
        + f", {role} {show(moment.next_token)}",
        covers,
    ]
    return "\n".join(lines)


def _span(length: int) -> str:
    return f"0..{length - 1}"
