"""`python -m mlx_dflash.trace`: the walk through prefill and rounds, live: what each cache covers, kept and refused drafts.

Watches a session from outside, between its rounds; prints what is there.
"""

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import islice

import mlx.core as mx

from ..block_size import chosen_block_size
from ..checkpoints.known_pairs import NO_DRAFT
from ..commands.errors import user_errors
from ..commands.flags import add_model_flags, add_prompt_flags, add_sampling_flags, read_message
from ..commands.loading import load_pair
from ..commands.sampling import sampler_from
from ..commands.templates import render_prompt
from ..session import Session


@dataclass(frozen=True)
class Moment:
    """The state after the prefill (number 0) or after one round.

    block: [anchor, drafts], empty for the prefill; it stood at positions block_start and after. kept, next_token:
    the verdict. confirmed: tokens of prompt and text. target_covers, context_covers: tokens whose K/V each has.
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


def describe(moment: Moment, prompt_length: int, tokenizer) -> str:
    """The moment in a few lines of text."""

    def show(token: int) -> str:
        return json.dumps(tokenizer.decode([token]), ensure_ascii=False)

    covers = (
        f"  target KV covers {_span(moment.target_covers)} · draft context KV covers {_span(moment.context_covers)} · "
        f"anchor {show(moment.next_token)} at {moment.confirmed - 1} is in neither"
    )
    if not moment.block:
        return "\n".join(
            [
                f"prefill: the target reads {prompt_length} prompt tokens; their features become the draft's context K/V",
                f"  the target says {show(moment.next_token)}",
                covers,
            ]
        )
    drafts, first = moment.block[1:], moment.block_start
    kept, refused = drafts[: moment.kept], drafts[moment.kept :]
    role = "corrects" if refused else "adds"
    lines = [
        f"round {moment.number}: block at {first}..{first + len(drafts)} = [{show(moment.block[0])}{', MASK' * len(drafts)}]; its own K/V is temporary",
        f"  draft    {' '.join(map(show, drafts)) or '(nothing left to draft)'}",
        f"  target   keeps {' '.join(map(show, kept)) or 'none'}"
        + (f", refuses {show(refused[0])}" if refused else "")
        + f", {role} {show(moment.next_token)}",
        covers,
    ]
    return "\n".join(lines)


def _span(length: int) -> str:
    return f"0..{length - 1}"


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="mlx_dflash.trace", description="Show what each cache covers, round by round."
    )
    add_model_flags(parser, default_block_size="the block that the draft was trained with")
    add_prompt_flags(parser)
    add_sampling_flags(parser)
    parser.add_argument("--rounds", type=int, default=8, help="rounds to show (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="one JSON object a moment instead of text")
    parser.add_argument("--svg", metavar="FILE", help="draw the walk, too")
    parser.add_argument("--html", metavar="FILE", help="draw the walk as a page to step through, too")
    args = parser.parse_args()
    with user_errors():
        _run(args)


def _run(args: argparse.Namespace) -> None:
    from ..api import open_session
    from ..pair import Pair

    if args.rounds < 1:
        raise ValueError(f"--rounds must be at least 1, got {args.rounds}")
    if args.stop_strings:
        raise ValueError("--stop-strings ends text, which a trace does not make")
    if args.draft_model == NO_DRAFT:
        raise ValueError(f"a trace needs a draft, got --draft-model {NO_DRAFT}")
    block_size = chosen_block_size(args.block_size, args.num_draft_tokens)
    message = read_message(args)
    model, tokenizer, draft = load_pair(args)
    prompt = mx.array(render_prompt(args, tokenizer, message, continues=False))
    if args.seed is not None:
        mx.random.seed(args.seed)
    session = open_session(
        Pair(model, draft),
        prompt,
        args.max_tokens,
        sampler=sampler_from(args, tokenizer),
        block_size=block_size,
        stop_tokens=tokenizer.eos_token_ids,
    )
    text, moments, notes = [], [], []
    for moment in islice(watch(session, prompt), args.rounds + 1):
        text += [*moment.block[1 : moment.kept + 1], moment.next_token]
        note = f"{describe(moment, prompt.size, tokenizer)}\n  text     {json.dumps(tokenizer.decode(text), ensure_ascii=False)}\n"
        print(json.dumps(asdict(moment)) if args.json else note, flush=True)
        moments.append(moment)
        notes.append(note)
    _draw(args, moments, notes, prompt.size, tokenizer)


def _draw(args: argparse.Namespace, moments: list[Moment], notes: list[str], prompt_length: int, tokenizer) -> None:
    """Write the pictures that were asked for."""
    from .drawing import draw, page

    def show(token: int) -> str:
        return tokenizer.decode([token])

    title = f"{args.model or 'demo pair'}: {moments[-1].confirmed - prompt_length} tokens in {len(moments) - 1} rounds"
    for file_name, picture in (
        (args.svg, lambda: draw(moments, prompt_length, show, title)),
        (args.html, lambda: page(moments, prompt_length, show, notes, title)),
    ):
        if file_name:
            with open(file_name, "w", encoding="utf-8") as file:
                file.write(picture())


if __name__ == "__main__":
    main()
