"""`python -m mlx_dflash.chat`: flags, loading, and the loop."""

import argparse
import json
import sys
from pathlib import Path

from ..checkpoints.known_pairs import NO_DRAFT, find_draft
from ..commands.errors import user_errors
from ..commands.flags import add_model_flags, block_options
from ..commands.loading import load_pair
from .settings import Settings


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mlx_dflash.chat", description="Talk with a target, with drafting; the demo pair without --model."
    )
    add_model_flags(parser)
    add = parser.add_argument
    add("--system-prompt", help="system message")
    add("--chat-template-config", type=json.loads, default={}, help="JSON object of options for the chat template")
    for name, default in vars(Settings(max_tokens=1024)).items():
        if not isinstance(default, bool):
            add(
                f"--{name.replace('_', '-')}",
                *(["-m"] if name == "max_tokens" else []),
                type=type(default),
                default=default,
                help="(default: %(default)s)",
            )
    add("--seed", type=int, help="seed of the random numbers (default: a new one each time)")
    add("--prefill-step-size", type=int, default=2048, help="prompt tokens processed at a time (default: %(default)s)")
    add(
        "--prompt-cache-file", help="a .safetensors file: continue the conversation in it, and save it there at the end"
    )
    add("--no-markdown", action="store_true", help="show the text as it is")
    return parser


def main() -> None:
    args = make_parser().parse_args()
    with user_errors():
        _run(args)


def _run(args: argparse.Namespace) -> None:
    try:
        from .terminal import Terminal
    except ModuleNotFoundError as error:
        raise ValueError(f"the chat needs {error.name}: pip install 'mlx-dflash[chat]'") from error
    file_name = args.prompt_cache_file
    if file_name and not file_name.endswith(".safetensors"):
        raise ValueError(f"--prompt-cache-file must end in .safetensors, got {file_name}")
    block = block_options(args)
    settings = Settings(**{name: getattr(args, name) for name in vars(Settings()) if name != "thinking"})
    terminal = Terminal(
        _conversation(args, settings, block),
        _pair_names(args),
        not args.no_markdown,
    )
    if file_name and Path(file_name).exists():
        terminal.load(file_name)
    model = args.model or "the demo pair"
    terminal.say(
        f"Talking to {model}{'' if terminal.conversation.drafting else ', without a draft'}. /help lists the commands, Ctrl-D leaves."
    )
    terminal.run()
    if file_name and terminal.conversation.messages:
        terminal.conversation.save(file_name, terminal.metadata)
        print(f"saved to {file_name}", file=sys.stderr)


def _pair_names(args: argparse.Namespace) -> dict[str, str]:
    """Name the pair as a file of caches records it; a draft that is found by the target's name has its own."""
    model = args.model or "demo"
    return {"model": model, "draft": args.draft_model or find_draft(model) or NO_DRAFT}


def _conversation(args: argparse.Namespace, settings: Settings, block: dict):
    import mlx.core as mx

    from .conversation import Conversation

    model, tokenizer, draft = load_pair(args)
    if args.seed is not None:
        mx.random.seed(args.seed)
    conversation = Conversation(model, tokenizer, draft, system=args.system_prompt, settings=settings)
    conversation.template_options = args.chat_template_config
    conversation.options = {"prefill_step_size": args.prefill_step_size, **block}
    return conversation


if __name__ == "__main__":
    main()
