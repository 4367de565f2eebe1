"""`python -m mlx_dflash.chat`: the flags, and a chat from its beginning to its end.

Knows argparse; what the flags mean is known where they are used.
"""

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from ..checkpoints.known_pairs import NO_DRAFT, find_draft
from ..commands.errors import Parser, run_command
from ..commands.flags import add_model_flags, block_options
from ..commands.loading import load_pair
from ..demo import DEMO
from ..files.json_text import parse_json
from .settings import Settings

if TYPE_CHECKING:
    from .conversation import Conversation


_HELP = {
    "temp": "sampling temperature; 0 takes the likeliest token",
    "top_p": "sample from the likeliest tokens that have this probability together; 1 is all",
    "min_p": "sample from tokens of at least this part of the likeliest token's probability; 0 is all",
    "top_k": "sample from this number of likeliest tokens; 0 is all",
    "xtc_probability": "probability with which XTC removes the likeliest tokens before a token is sampled",
    "xtc_threshold": "probability from which XTC counts a token among the likeliest",
    "max_tokens": "most tokens of an answer, -1 for no limit",
}


def make_parser() -> Parser:
    """Make the parser: the flags of the pair, of the settings, and of the chat itself."""
    parser = Parser(
        prog="mlx_dflash.chat",
        description="Talk with a target that uses its draft; without --model, with the demo pair.",
    )
    add_model_flags(parser)
    add = parser.add_argument
    add("--system-prompt", help="system message")
    add("--chat-template-config", type=parse_json, default={}, help="JSON object of options for the chat template")
    for name, what in _HELP.items():
        default = getattr(Settings(), name)
        flags = [f"--{name.replace('_', '-')}", *(["-m"] if name == "max_tokens" else [])]
        add(*flags, type=type(default), default=default, help=f"{what} (default: %(default)s)")
    add("--seed", type=int, help="seed of the random numbers (default: a new one each time)")
    add(
        "--prefill-step-size",
        type=int,
        default=2048,
        help="number of prompt tokens that are processed at a time (default: %(default)s)",
    )
    add(
        "--prompt-cache-file",
        help=".safetensors file with a conversation and its caches: continued if it exists, and saved at the end",
    )
    add("--no-markdown", action="store_true", help="show answers as plain text, not as Markdown")
    return parser


def main() -> None:
    """Talk until the person leaves."""
    run_command(make_parser, _run)


def _run(args: argparse.Namespace) -> None:
    try:
        from .terminal import Terminal
    except ModuleNotFoundError as error:
        raise ValueError(f"the chat needs {error.name}: pip install 'mlx-dflash[chat]'") from error
    from ..files.folders import check_writable
    from .files import CACHE_SUFFIX, save

    file_name = args.prompt_cache_file
    if file_name and not file_name.endswith(CACHE_SUFFIX):
        raise ValueError(f"--prompt-cache-file must end in {CACHE_SUFFIX}, got {file_name}")
    if file_name:
        check_writable(Path(file_name))
    terminal = Terminal(_conversation(args), _pair_names(args), not args.no_markdown)
    conversation = terminal.conversation
    if file_name and Path(file_name).exists():
        terminal.load(file_name)
    pair = (args.model or "the demo pair") + ("" if conversation.drafting else ", without a draft")
    terminal.say(f"Talking to {pair}. /help lists the commands, Ctrl-D leaves.")
    terminal.run()
    if file_name and conversation.messages:
        save(conversation, file_name, terminal.pair)
        print(f"saved to {file_name}", file=sys.stderr)


def _conversation(args: argparse.Namespace) -> "Conversation":
    import mlx.core as mx

    from .conversation import Conversation

    block, settings = block_options(args), Settings(**{name: getattr(args, name) for name in _HELP})
    model, tokenizer, draft = load_pair(args)
    if args.seed is not None:
        mx.random.seed(args.seed)
    return Conversation(
        model,
        tokenizer,
        draft,
        system=args.system_prompt,
        settings=settings,
        template_options=args.chat_template_config,
        prefill_step_size=args.prefill_step_size,
        **block,
    )


def _pair_names(args: argparse.Namespace) -> dict[str, str]:
    """Name the pair as a file of caches records it; a draft that is found by the target's name has its own."""
    model = args.model or DEMO
    return {"model": model, "draft": args.draft_model or find_draft(model) or NO_DRAFT}


if __name__ == "__main__":
    main()
