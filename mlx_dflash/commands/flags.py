"""The flags that the front ends share, and what some of them ask for.

Knows argparse and mlx-lm's names of the flags; knows nothing of models.
"""

import argparse
import json
import sys
from typing import Any

NO_DRAFT = "none"


def add_model_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", help="target: a folder or hub repository (default: the demo pair)")
    add(
        "--draft-model",
        help=f"DFlash draft of the target: a folder or hub repository; {NO_DRAFT!r} generates without one",
    )
    add(
        "--block-size",
        type=block_size,
        metavar="N",
        help="tokens of a block, anchor included, or 'auto' for what proves fastest (default)",
    )
    add("--num-draft-tokens", type=int, help="mlx-lm's way to say block size - 1")
    add("--adapter-path", help="LoRA adapters of the target")
    add("--trust-remote-code", action="store_true", help="let the tokenizer run its own code")
    add("--quantize-activations", "-qa", action="store_true", help="quantize the target's activations like its layers")
    add("--extra-eos-token", nargs="+", default=(), help="more tokens that end the text")


def add_prompt_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--prompt", "-p", default="hello", help="the message; '-' reads it from stdin")
    add("--prompt-file", help="read the message from this file")
    add("--system-prompt", help="system message for the chat template")
    add("--prefill-response", help="beginning of the answer")
    add("--ignore-chat-template", action="store_true", help="use the prompt as it is")
    add("--use-default-chat-template", action="store_true", help="use the tokenizer's default chat template")
    add("--chat-template-config", type=json.loads, default={}, help="JSON object of options for the chat template")


def add_sampling_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--max-tokens",
        "-m",
        type=int,
        default=256,
        help="most tokens to generate, -1 for no limit (default: %(default)s)",
    )
    add_filter_flags(parser)
    add("--xtc-probability", type=float, default=0.0, help="how often to exclude top choices (default: never)")
    add("--xtc-threshold", type=float, default=0.0, help="probability from which on a token is a top choice")
    add("--min-tokens-to-keep", type=int, default=1, help="least tokens that min-p keeps (default: %(default)s)")
    add("--seed", type=int, help="seed of the random numbers (default: a new one each time)")
    add("--stop-strings", nargs="+", default=(), help="end the text before the first of these")


def add_filter_flags(parser: argparse._ActionsContainer) -> None:
    """What a server takes, too, for requests that do not say."""
    add = parser.add_argument
    add("--temp", type=float, default=0.0, help="temperature; 0 is greedy (default)")
    add("--top-p", type=float, default=1.0, help="nucleus sampling (default: off)")
    add("--min-p", type=float, default=0.0, help="least probability relative to the likeliest token (default: off)")
    add("--top-k", type=int, default=0, help="sample from the k likeliest tokens (default: off)")


def block_size(text: str) -> int | str:
    """A number, or "auto"; ValueError otherwise."""
    return text if text == "auto" else int(text)


def block_options(args: argparse.Namespace) -> dict[str, Any]:
    """What --block-size and --num-draft-tokens ask of stream_generate; ValueError for both, or without a draft."""
    if args.draft_model == NO_DRAFT:
        if args.block_size is not None or args.num_draft_tokens is not None:
            raise ValueError("--block-size and --num-draft-tokens need a draft")
        return {}
    if args.num_draft_tokens is None:
        return {"block_size": "auto" if args.block_size is None else args.block_size}
    if args.block_size is not None:
        raise ValueError("give --block-size or --num-draft-tokens, not both")
    return {"num_draft_tokens": args.num_draft_tokens}


def read_message(args: argparse.Namespace) -> str:
    """The prompt's text, from the argument, a file or stdin."""
    if args.prompt_file:
        with open(args.prompt_file) as file:
            return file.read()
    if args.prompt == "-":
        return sys.stdin.read()
    return args.prompt.replace("\\n", "\n").replace("\\t", "\t")
