"""The flags that several front ends share, and what some of them ask for.

Knows argparse and the names that mlx-lm gives these flags; knows nothing of models.
"""

import argparse
import os
import select
import stat
import sys
from typing import Any

from ..block_size import AUTO, chosen_block_size
from ..checkpoints.known_pairs import NO_DRAFT
from ..files.json_text import parse_json

_GREETING = "hello"  # as mlx-lm
_PATIENCE = 1.0  # seconds that a pipe gets to bring the beginning of a prompt


def add_model_flags(parser: argparse.ArgumentParser, default_block_size: str = AUTO) -> None:
    """Add the flags that name a target and its draft. default_block_size: what the help says --block-size is."""
    add = parser.add_argument
    add("--model", help="target: a folder or a repository of the Hugging Face hub (default: the demo pair)")
    add(
        "--draft-model",
        help=f"DFlash draft that was trained for the target: a folder, a .gguf file or a repository, or {NO_DRAFT!r} "
        "to generate without a draft (default: the public draft of the target)",
    )
    add(
        "--block-size",
        type=block_size,
        metavar="N",
        help="number of tokens that a round verifies, the anchor and its drafts, or 'auto' for the number that proves "
        f"fastest (default: {default_block_size})",
    )
    add(
        "--num-draft-tokens",
        type=int,
        metavar="N",
        help="number of drafts of a round, one less than --block-size; give one of the two",
    )
    add("--adapter-path", help="folder of LoRA adapters of the target")
    add("--trust-remote-code", action="store_true", help="let the tokenizer run code that comes with the model")
    add(
        "--quantize-activations",
        "-qa",
        action="store_true",
        help="quantize the activations of each quantized layer of the target like its weights",
    )
    add("--extra-eos-token", nargs="+", default=(), help="further tokens that end the text")


def add_prompt_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that say what the prompt is; read_message and templates.render_prompt read them."""
    add = parser.add_argument
    add("--prompt", "-p", help="the user's message; '-' reads it from stdin (default: stdin if something is piped in)")
    add("--prompt-file", help="file that holds the user's message")
    add("--system-prompt", help="system message for the chat template")
    add("--prefill-response", help="text that the answer begins with")
    add("--ignore-chat-template", action="store_true", help="use the message as the prompt, without the chat template")
    add("--use-default-chat-template", action="store_true", help="use the tokenizer's default chat template")
    add("--chat-template-config", type=parse_json, default={}, help="JSON object of options for the chat template")


def add_sampling_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags for the length of the text, its end, and the choice of its tokens; sampler_from reads the last."""
    add = parser.add_argument
    add(
        "--max-tokens",
        "-m",
        type=int,
        default=256,
        help="most tokens to generate, -1 for no limit (default: %(default)s)",
    )
    add_filter_flags(parser)
    add(
        "--xtc-probability",
        type=float,
        default=0.0,
        help="probability with which XTC removes the likeliest tokens before a token is sampled (default: 0, off)",
    )
    add(
        "--xtc-threshold",
        type=float,
        default=0.0,
        help="probability from which XTC counts a token among the likeliest (default: %(default)s)",
    )
    add(
        "--min-tokens-to-keep",
        type=int,
        default=1,
        help="number of tokens that --min-p keeps at least (default: %(default)s)",
    )
    add("--seed", type=seed, help="seed of the random numbers (default: a new one each time)")
    add("--stop-strings", nargs="+", default=(), help="strings that end the text; it ends before the first of them")


def add_filter_flags(parser: argparse._ActionsContainer) -> None:
    """Add the flags of the samplers that everybody offers; for a server they hold where a request says nothing."""
    add = parser.add_argument
    add("--temp", type=float, default=0.0, help="sampling temperature; 0 takes the likeliest token (default: 0)")
    add(
        "--top-p",
        type=float,
        default=1.0,
        help="sample from the likeliest tokens that have this probability together (default: 1, all)",
    )
    add(
        "--min-p",
        type=float,
        default=0.0,
        help="sample from tokens of at least this part of the likeliest token's probability (default: 0, all)",
    )
    add("--top-k", type=int, default=0, help="sample from this number of likeliest tokens (default: 0, all)")


def seed(text: str) -> int:
    """Read a seed of MLX's random numbers. Raises ArgumentTypeError for one that MLX does not take."""
    if not text.isdecimal() or int(text) >= 2**64:
        raise argparse.ArgumentTypeError(f"must be a whole number from 0 to 2**64 - 1, got {text!r}")
    return int(text)


def block_size(text: str) -> int | str:
    """Read a number, or "auto". Raises ValueError for anything else."""
    return text if text == AUTO else int(text)


def block_options(args: argparse.Namespace) -> dict[str, Any]:
    """Return the options of stream_generate that --block-size and --num-draft-tokens ask for, "auto" by default.

    Raises ValueError if both are given, or either without a draft.
    """
    has_draft = args.draft_model != NO_DRAFT
    chosen = chosen_block_size(args.block_size, args.num_draft_tokens, has_draft)
    return {"block_size": AUTO if chosen is None else chosen} if has_draft else {}


def read_message(args: argparse.Namespace) -> str:
    """Return the user's message: that of --prompt or --prompt-file, else what is piped in, else "hello".

    Raises ValueError if both flags are given, and OSError or ValueError for a file that is no text.
    """
    if args.prompt is not None and args.prompt_file is not None:
        raise ValueError("give --prompt or --prompt-file, not both")
    if args.prompt_file is not None:
        try:
            with open(args.prompt_file, encoding="utf-8") as file:
                return file.read()
        except UnicodeDecodeError as error:
            raise ValueError(f"{args.prompt_file} is no text in UTF-8: {error}") from error
    if args.prompt == "-" or args.prompt is None and _is_piped_in():
        return sys.stdin.read() or _GREETING
    return (_GREETING if args.prompt is None else args.prompt).replace("\\n", "\n").replace("\\t", "\t")


def _is_piped_in() -> bool:
    """Whether stdin is a pipe or a file from which something comes within a second."""
    try:
        kind = os.fstat(sys.stdin.fileno()).st_mode
    except (OSError, ValueError, AttributeError):
        return False  # closed, or not a file of the system
    if not (stat.S_ISFIFO(kind) or stat.S_ISREG(kind)):
        return False
    return bool(select.select([sys.stdin], [], [], _PATIENCE)[0])
