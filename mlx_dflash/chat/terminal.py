"""The chat in a terminal: reads lines, shows answers and a status line.

Knows prompt_toolkit, rich and signals; knows nothing of tokens or caches.
"""

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from prompt_toolkit import PromptSession
from prompt_toolkit.auto_suggest import AutoSuggestFromHistory
from prompt_toolkit.completion import NestedCompleter
from prompt_toolkit.history import FileHistory, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings
from rich.console import Console

from ..commands.errors import USER_ERRORS
from ..commands.progress import prefill_bar
from ..files.places import cache_folder
from ..models.context_length import Overlong, context_length
from .commands import COMMANDS, Leave, run_command
from .conversation import Conversation
from .files import load
from .view import AnswerView

_FAULTS = (*USER_ERRORS, RuntimeError)  # after which the chat goes on; RuntimeError is what MLX raises


class Terminal:
    """A person at a conversation.

    pair: names of the target and the draft, which caches are saved with, and must have been saved with to be loaded.
    """

    def __init__(self, conversation: Conversation, pair: dict[str, str], markdown: bool = True):
        self.conversation, self.pair, self.markdown = conversation, pair, markdown
        self.console = Console(highlight=False)

    def say(self, text: str) -> None:
        """Tell the person something that is not part of the conversation."""
        self._print(text, "dim")

    def _print(self, text: str, style: str) -> None:
        # A terminal would break lines within words; what reads a pipe gets them whole.
        self.console.print(text, style=style, markup=False, soft_wrap=not self.console.is_terminal)

    def run(self) -> None:
        """Read and answer until the person leaves. Raises what is no mistake of theirs."""
        read = _reader() if sys.stdin.isatty() else _read_line
        while True:
            try:
                line = read()
                if line.startswith("/"):
                    run_command(self, line)
                elif line.strip():
                    self.answer(line)
            except (EOFError, Leave):
                return
            except KeyboardInterrupt:
                self.say("Ctrl-D or /quit leaves.")
            except _FAULTS as error:
                told = " ".join(str(error).split()) or type(error).__name__
                self._print(f"error: {told}", "red")
                if isinstance(error, Overlong):
                    self.say("The message was not sent. /drop forgets the oldest turn.")

    def answer(self, text: str) -> None:
        """Send a message and show the answer with its status line. Ctrl-C stops it."""
        conversation = self.conversation
        with _keys_unseen(), _watch_ctrl_c() as was_pressed, prefill_bar() as progress:
            with AnswerView(self.console, self.markdown) as view:
                for kind, piece in conversation.ask(text, was_pressed, progress):
                    view.feed(kind, piece)
        for notice in conversation.turn.notices:
            self.say(notice)
        if conversation.turn.response is not None:
            self.say(self._status())
        limit = context_length(conversation.model)
        if limit is not None and len(conversation.covered) >= limit:
            self.say(f"The model's context of {limit} tokens is full. /drop forgets the oldest turn.")

    def load(self, file_name: str) -> None:
        """Continue a saved conversation, and say how much of it has to be read again."""
        has_caches = load(self.conversation, file_name, self.pair)
        read = "its caches too" if has_caches else "the next message reads it again"
        self.say(f"Continuing {len(self.conversation.messages)} messages from {file_name}, {read}.")

    def _status(self) -> str:
        turn = self.conversation.turn
        response, stats = turn.response, turn.response.stats if self.conversation.draft is not None else None
        count = response.generation_tokens
        parts = [f"{count} tokens", f"{response.generation_tps:.1f} tokens/s"] if count > 1 else ["1 token"]
        if stats is not None and stats.num_rounds:
            parts.append(f"acceptance length {stats.acceptance_length:.2f}")
        limit = context_length(self.conversation.model)
        used = len(self.conversation.covered)
        parts.append(f"context {used}" + (f" of {limit}" if limit else "") + f", {turn.num_read} read")
        stopped = {None: ["stopped"], "length": ["cut"]}.get(response.finish_reason, [])
        return "[" + " · ".join(parts + stopped) + "]"


def _read_line() -> str:
    """Read one message, a line of a stdin that is no terminal. Raises EOFError at its end."""
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    return line.rstrip("\n")


def _reader() -> Callable[[], str]:
    """Make the line editor, with history, completion of commands, and new lines inside a message."""
    keys = KeyBindings()

    # Ctrl-J is what Enter becomes when somebody types ahead, before the line is being read.
    @keys.add("enter")
    @keys.add("c-j")
    def _(event):
        buffer = event.current_buffer
        if buffer.text[: buffer.cursor_position].endswith("\\"):
            buffer.delete_before_cursor()
            buffer.insert_text("\n")
        else:
            buffer.validate_and_handle()

    @keys.add("escape", "enter")
    def _(event):
        event.current_buffer.insert_text("\n")

    completer = NestedCompleter.from_nested_dict({n: dict.fromkeys(c.choices) or None for n, c in COMMANDS.items()})
    try:
        cache_folder().mkdir(parents=True, exist_ok=True)
        history = FileHistory(str(cache_folder() / "chat_history"))
    except OSError:
        history = InMemoryHistory()
    session = PromptSession(
        "> ",
        history=history,
        completer=completer,
        auto_suggest=AutoSuggestFromHistory(),
        key_bindings=keys,
        multiline=True,
        prompt_continuation="… ",
        complete_while_typing=False,
    )
    return session.prompt


@contextmanager
def _keys_unseen() -> Iterator[None]:
    """Keep the terminal from showing the keys that are pressed: its ^C would stand in the way of a live paragraph."""
    if not sys.stdin.isatty():
        yield
        return
    import termios

    before = termios.tcgetattr(sys.stdin)
    unseen = [*before]
    unseen[3] &= ~termios.ECHO  # the local modes
    termios.tcsetattr(sys.stdin, termios.TCSANOW, unseen)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSANOW, before)


@contextmanager
def _watch_ctrl_c() -> Iterator[Callable[[], bool]]:
    """Yield a question that says whether Ctrl-C was pressed; a second Ctrl-C interrupts as usual."""
    pressed = False

    def press(number, frame):
        nonlocal pressed
        if pressed:
            raise KeyboardInterrupt
        pressed = True

    before = signal.signal(signal.SIGINT, press)
    try:
        yield lambda: pressed
    finally:
        signal.signal(signal.SIGINT, before)
