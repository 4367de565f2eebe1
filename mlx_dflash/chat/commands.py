"""The commands of the chat, which begin with a slash.

Knows the conversation and its files; shows what it has to say through the terminal.
"""

import textwrap
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from .files import save
from .settings import on_or_off


@dataclass(frozen=True)
class Command:
    """One command. run: called with the terminal and the argument. usage, what: for /help. choices: of the argument."""

    run: Callable[[Any, str], None]
    usage: str
    what: str
    choices: tuple[str, ...] = ()


class Leave(Exception):
    """The person is done."""


def _help(chat: Any, argument: str) -> None:
    width = max(len(command.usage) for command in COMMANDS.values())
    for command in COMMANDS.values():
        begin, indent = f"  {command.usage:<{width}}  ", " " * (width + 4)
        most = max(chat.console.width, len(indent) + 10)
        chat.say(textwrap.fill(command.what, most, initial_indent=begin, subsequent_indent=indent))
    chat.say("Enter sends; Alt-Enter or a \\ at the end begins a new line. Ctrl-C stops an answer, Ctrl-D leaves.")


def _reset(chat: Any, argument: str) -> None:
    chat.conversation.reset()
    chat.say("The conversation is forgotten.")


def _system(chat: Any, argument: str) -> None:
    conversation = chat.conversation
    if not argument:
        chat.say(f"System message: {conversation.system}" if conversation.system else "There is no system message.")
        return
    conversation.system = None if argument == "none" else argument
    chat.say("The next message is sent with it." if conversation.system else "The system message is gone.")


def _save(chat: Any, argument: str) -> None:
    if not argument:
        raise ValueError("/save needs a file name; one that ends in .safetensors keeps the caches too")
    save(chat.conversation, argument, chat.pair)
    chat.say(f"Saved to {argument}.")


def _load(chat: Any, argument: str) -> None:
    if not argument:
        raise ValueError("/load needs the name of a file that /save wrote")
    chat.load(argument)


def _undo(chat: Any, argument: str) -> None:
    chat.say(f"Taken back: {chat.conversation.undo()}")


def _drop(chat: Any, argument: str) -> None:
    chat.say(f"Forgotten: {chat.conversation.drop()}")


def _retry(chat: Any, argument: str) -> None:
    chat.answer(chat.conversation.undo())


def _stats(chat: Any, argument: str) -> None:
    from ..api import report

    turn = chat.conversation.turn
    if turn is None or turn.response is None:
        raise ValueError("there is no answer yet")
    chat.say(report(turn.response))
    chat.say(f"Prompt tokens in the caches: {turn.num_cached}, read: {turn.num_read}")


def _set(chat: Any, argument: str) -> None:
    name, _, value = argument.partition(" ")
    if not name:
        chat.say(
            "  ".join(
                f"{k} {_shown(v)}"
                for k, v in [*asdict(chat.conversation.settings).items(), ("markdown", chat.markdown)]
            )
        )
    elif name == "markdown":
        chat.markdown = on_or_off(name, value.strip())
    else:
        chat.conversation.settings.set(name, value.strip())


def _shown(value: Any) -> str:
    return ("off", "on")[value] if isinstance(value, bool) else str(value)


def _draft(chat: Any, argument: str) -> None:
    if argument:
        chat.conversation.use_draft(on_or_off("/draft", argument))
    chat.say(
        f"Drafting is {_shown(chat.conversation.drafting)}."
        + (" The next message reads the conversation again." if argument else "")
    )


def _quit(chat: Any, argument: str) -> None:
    raise Leave


_SETTINGS = (
    "temp",
    "top_p",
    "min_p",
    "top_k",
    "xtc_probability",
    "xtc_threshold",
    "max_tokens",
    "thinking",
    "markdown",
)
COMMANDS = {
    "/help": Command(_help, "/help", "this list"),
    "/reset": Command(_reset, "/reset", "forget the conversation"),
    "/system": Command(_system, "/system [TEXT|none]", "show or change the system message"),
    "/undo": Command(_undo, "/undo", "take back the last message and its answer"),
    "/drop": Command(_drop, "/drop", "forget the oldest message and its answer, to make room"),
    "/retry": Command(_retry, "/retry", "answer the last message again"),
    "/set": Command(_set, "/set [NAME VALUE]", "show or change a setting, as /set temp 0.7", _SETTINGS),
    "/draft": Command(_draft, "/draft [on|off]", "draft, or generate as plain mlx-lm", ("on", "off")),
    "/stats": Command(_stats, "/stats", "rounds, acceptance and times of the last answer"),
    "/save": Command(_save, "/save FILE", "keep the conversation; with its caches in a .safetensors"),
    "/load": Command(_load, "/load FILE", "continue a saved conversation"),
    "/quit": Command(_quit, "/quit", "leave"),
}


def run_command(chat: Any, line: str) -> None:
    """Run a line that begins with a slash. Raises ValueError for an unknown command or a wrong argument."""
    name, _, argument = line.strip().partition(" ")
    matches = [n for n in COMMANDS if n.startswith(name)] if name not in COMMANDS else [name]
    if len(matches) != 1:
        raise ValueError(
            f"there is no command {name}; /help lists them"
            if not matches
            else f"{name} could be {' or '.join(matches)}"
        )
    COMMANDS[matches[0]].run(chat, argument.strip())
