"""The command `python -m mlx_dflash.trace`: prefill and rounds of one prompt, as they happen.

It shows which drafts are kept and which are refused, and what each cache covers. Knows flags and prints; the moments
that it shows are made by moments.py.
"""

import argparse
import json
import sys
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any

from ..block_size import chosen_block_size
from ..checkpoints.known_pairs import NO_DRAFT
from ..commands.errors import Parser, run_command
from ..commands.flags import add_model_flags, add_prompt_flags, add_sampling_flags, read_message
from ..commands.loading import load_pair
from ..commands.sampling import check_sampling, sampler_from
from ..commands.templates import render_prompt
from ..files.folders import check_writable


def main() -> None:
    """Parse the command line and show the rounds of a prompt."""
    run_command(make_parser, _run)


def make_parser() -> Parser:
    """Return a parser of the flags of a trace."""
    parser = Parser(
        prog="mlx_dflash.trace",
        description="Show round by round which tokens are drafted and kept, and what each cache covers.",
    )
    add_model_flags(parser, default_block_size="the block that the draft was trained with")
    add_prompt_flags(parser)
    add_sampling_flags(parser)
    parser.add_argument("--rounds", type=int, default=8, help="number of rounds to show (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON object for the prefill and for each round")
    parser.add_argument("--svg", metavar="FILE", help="draw the rounds as a picture into this file as well")
    parser.add_argument(
        "--html", metavar="FILE", help="draw the rounds as a page to step through into this file as well"
    )
    return parser


def _run(args: argparse.Namespace) -> None:
    import mlx.core as mx

    from ..api import open_session
    from ..models.context_length import refuse_overlong
    from ..pair import Pair
    from .moments import describe, watch

    if args.rounds < 1:
        raise ValueError(f"--rounds must be at least 1, got {args.rounds}")
    if args.stop_strings:
        raise ValueError("--stop-strings is of no use here: a trace ends after --rounds rounds")
    if args.draft_model == NO_DRAFT:
        raise ValueError(f"a trace needs a draft, got --draft-model {NO_DRAFT}")
    block_size = chosen_block_size(args.block_size, args.num_draft_tokens)
    check_sampling(args)
    for file_name in filter(None, (args.svg, args.html)):
        check_writable(Path(file_name))
    message = read_message(args)
    model, tokenizer, draft = load_pair(args)
    ids = render_prompt(args, tokenizer, message, continues=False)
    refuse_overlong(model, len(ids))
    prompt = mx.array(ids)
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
        so_far = json.dumps(tokenizer.decode(text), ensure_ascii=False)
        note = f"{describe(moment, prompt.size, tokenizer)}\n  text     {so_far}\n"
        print(json.dumps(asdict(moment)) if args.json else note, flush=True)
        moments.append(moment)
        notes.append(note)
    if moments[-1].finish_reason is None:
        told = f"stopped after {args.rounds} rounds, before the end of the text; --rounds shows more"
        print(told, file=sys.stderr if args.json else sys.stdout)
    _draw(args, moments, notes, (prompt.size, message, tokenizer.decode(text)), tokenizer)


def _draw(
    args: argparse.Namespace, moments: list[Any], notes: list[str], text: tuple[int, str, str], tokenizer: Any
) -> None:
    """Write the pictures that --svg and --html ask for. text: length of the prompt, the user's message, the answer."""
    from .drawing import draw, page

    def show(token: int) -> str:
        return tokenizer.decode([token])

    length, *words = text
    title = f"{args.model or 'demo pair'}: {moments[-1].confirmed - length} tokens in {len(moments) - 1} rounds"
    heading = title, (words[0], words[1])
    for file_name, picture in (
        (args.svg, lambda: draw(moments, show, *heading)),
        (args.html, lambda: page(moments, show, notes, heading)),
    ):
        if file_name:
            with open(file_name, "w", encoding="utf-8") as file:
                file.write(picture())


if __name__ == "__main__":
    main()
