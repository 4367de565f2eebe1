"""The chat as a person meets it: a pseudo-terminal, keys, what is on the screen."""

import contextlib
import io
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pexpect
import pyte
import pytest
from rich.console import Console
from rich.markdown import Markdown

from mlx_dflash.chat import view
from mlx_dflash.chat.view import AnswerView

pytestmark = pytest.mark.process

GAP = r"(?:\s|\x1b\[\d*m)+"  # between two words, perhaps on two lines
ROOT = Path(__file__).parents[2]
WORDS = r"\[\d+ tokens · [\d.]+ tokens/s · acceptance length [\d.]+ · context (\d+) of 4096, (\d+) read"
STATUS = WORDS.replace(" ", GAP)


def command(pair, *flags):
    return [sys.executable, "-m", "mlx_dflash.chat", "--model", str(pair[0]), "--draft-model", str(pair[1]), *flags]


def environment(home, **more):
    # Whoever runs the tests in several processes may have said how wide their own terminals are.
    own = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    return {
        **own,
        "PYTHONPATH": str(ROOT),
        "HOME": str(home),
        "HF_HUB_OFFLINE": "1",
        "PROMPT_TOOLKIT_NO_CPR": "1",
        **more,
    }


class Person:
    """Somebody at the keyboard: types lines, presses keys, waits for what the screen shows."""

    def __init__(self, arguments, env, columns=120):
        self.columns, self.shown = columns, io.StringIO(newline="")
        self.child = pexpect.spawn(
            arguments[0], arguments[1:], env=env, encoding="utf-8", timeout=60, dimensions=(40, columns)
        )
        self.child.logfile_read = self.shown

    def watch(self, seconds):
        """Look at what comes for a while."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            with contextlib.suppress(pexpect.TIMEOUT):
                self.child.read_nonblocking(10_000, 0.1)

    def screen(self):
        """All lines that the terminal has shown and that still stand there, scrolled out or not."""
        screen = pyte.HistoryScreen(self.columns, 40, history=10_000)
        pyte.Stream(screen).feed(self.shown.getvalue())
        gone = ["".join(row[x].data for x in range(self.columns)) for row in screen.history.top]
        return [line.rstrip() for line in [*gone, *screen.display]]

    def see(self, pattern):
        self.child.expect(pattern)
        return self.child.match

    def type(self, text):
        """Type a line at the prompt and press Enter."""
        self.child.send(text + "\r")

    def interrupt_answer(self, line):
        """Press Ctrl-C in the answer to this line; before its first text, the line editor would get the key."""
        self.see(rf"{line}\r+\n[!-~]{{2}}")
        self.child.sendcontrol("c")

    def leave(self):
        """Press Ctrl-D, once the next prompt is there to take it (it asks for bracketed paste)."""
        self.child.expect(r"\?2004h")
        self.child.sendcontrol("d")
        self.child.expect(pexpect.EOF)
        self.child.close()
        return self.child.exitstatus


def test_a_session_at_the_terminal(pair, tmp_path):
    file_name = tmp_path / "session.safetensors"
    person = Person(
        command(pair, "-m", "12", "--prompt-cache-file", str(file_name)), environment(tmp_path, TERM="xterm-256color")
    )
    person.see(rf"Talking to .*/help{GAP}lists{GAP}the{GAP}commands")
    person.type("hello")
    first = person.see(STATUS)
    person.type("and you?")
    second = person.see(STATUS)
    assert int(second[2]) <= len("user: and you?") + len("assistant: ") + 2, "the second turn reads only what is new"
    assert int(second[1]) > int(first[1])
    person.type("/undo")
    person.see("Taken back: and you?")
    person.type("/set temp 0.7")
    person.type("/set top_k 1")
    person.type("/set temp hot")
    person.see("error: temp must be a number, got 'hot'")
    person.type("/retry")
    person.see(STATUS)
    person.child.send("/hel\t\r")
    person.see(r"/quit +leave")
    person.type("/nonsense")
    person.see("there is no command /nonsense")
    person.type("first line\\")
    person.type("second line")
    person.see(STATUS)
    person.type("/save " + str(tmp_path / "text.json"))
    person.see("Saved to")
    person.type("/stats")
    person.see("Rounds by kept drafts")
    person.see(r"\x1b\[\?2004h")  # the prompt reads keys again; before, Ctrl-C would be a signal
    person.child.sendcontrol("c")
    person.see("Ctrl-D or /quit leaves")
    assert person.leave() == 0
    messages = json.loads((tmp_path / "text.json").read_text())["messages"]
    assert [m["content"] for m in messages if m["role"] == "user"] == ["hello", "first line\nsecond line"]
    resumed = Person(
        command(pair, "-m", "5", "--prompt-cache-file", str(file_name)), environment(tmp_path, TERM="xterm-256color")
    )
    resumed.see(rf"Continuing{GAP}4{GAP}messages{GAP}from.*its{GAP}caches{GAP}too")
    resumed.child.send("\x1b[A")  # Up: the last line of the session before.
    resumed.see("/stats")
    resumed.child.sendcontrol("u")
    resumed.type("more")
    assert int(resumed.see(STATUS)[2]) < 30
    assert resumed.leave() == 0


def test_ctrl_c_stops_the_answer_and_keeps_the_session(pair, tmp_path):
    person = Person(command(pair, "-m", "3000"), environment(tmp_path, TERM="dumb"))
    person.see(rf"/help{GAP}lists{GAP}the{GAP}commands[^>]*> ")
    person.type("go on for ever")
    person.interrupt_answer("for ever")
    person.see(rf"read{GAP}·{GAP}stopped\]")
    # The same question again: whether another one is answered at length depends on where the first answer stopped.
    person.type("/retry")
    person.interrupt_answer("/retry")
    person.see(rf"read{GAP}·{GAP}stopped\]\r+\n> ")
    person.type("/quit")
    person.child.expect(pexpect.EOF)
    person.child.close()
    assert person.child.exitstatus == 0


@pytest.mark.parametrize("columns", [40, 80])
def test_ctrl_c_in_a_paragraph_leaves_one_of_it_and_every_line_fits(pair, tmp_path, columns):
    person = Person(command(pair, "-m", "3000"), environment(tmp_path, TERM="xterm-256color"), columns)
    person.see(r"\?2004h")
    person.type("go on for ever")
    person.see(r"\?2004l")
    person.watch(2)
    person.child.sendcontrol("c")
    person.see("stopped")
    person.type("/help")
    person.see("/quit +leave")
    assert person.leave() == 0
    lines = person.screen()
    end = next(i for i, line in enumerate(lines) if line.startswith("["))
    start = next(i for i, line in enumerate(lines) if line.startswith("> go on"))
    answer = lines[start + 1 : end]
    assert len(answer) > 1 and all(len(line) == columns for line in answer[:-1])
    assert len(answer[0]) == columns and answer.count(answer[0]) == 1, answer
    assert "^C" not in "".join(answer)
    words = " ".join(lines[end : lines.index(next(line for line in lines if line.startswith("> /help")))])
    assert re.fullmatch(WORDS + r" · stopped\]", words)
    help_text = [line for line in lines if not line.startswith(">")]
    assert {"forget", "the", "conversation"} <= set(" ".join(help_text).split())


@pytest.mark.parametrize("columns", [40, 80])
def test_an_interrupted_paragraph_stands_on_the_screen_once(columns, monkeypatch):
    monkeypatch.setattr("mlx_dflash.chat.view._REFRESH_SECONDS", -1)  # every piece is drawn
    out, words = io.StringIO(), [f"word{i} " for i in range(60)]
    console = Console(file=out, force_terminal=True, width=columns, height=40, _environ={"TERM": "xterm-256color"})
    with pytest.raises(KeyboardInterrupt), AnswerView(console, markdown=True) as view:
        for word in words:
            view.feed("normal", word)
        raise KeyboardInterrupt
    screen = pyte.Screen(columns, 40)
    pyte.Stream(screen).feed(out.getvalue().replace("\n", "\r\n"))
    lines = [line.strip() for line in screen.display if line.strip()]
    assert " ".join(lines) == "".join(words).strip()


def test_lines_from_a_pipe(pair, tmp_path):
    done = subprocess.run(
        command(pair, "-m", "5"),
        input="hello\n/draft off\n/quit\n",
        env=environment(tmp_path),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert re.search(STATUS, done.stdout) and "Drafting is off" in done.stdout
    assert "\x1b" not in done.stdout


@pytest.mark.parametrize(
    "flags, message",
    [(["--prompt-cache-file", "x.npz"], "must end in .safetensors"), (["--temp", "-1"], "temp must be")],
)
def test_wrong_flags_are_one_line(pair, tmp_path, flags, message):
    done = subprocess.run(command(pair, *flags), env=environment(tmp_path), capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and message in done.stderr and "Traceback" not in done.stderr


MARKDOWN = (
    "# Rivers\n\nThree **rivers**:\n\n1. Danube\n2. Rhine\n\n```python\nprint('x')\n\nprint('y')\n```\n\nThat is *all*."
)


def screen(write):
    """The lines, without blank ones, that stand on a terminal of 60 x 40 after write(console)."""
    console = Console(file=io.StringIO(), force_terminal=True, width=60, height=40)
    write(console)
    terminal = pyte.Screen(60, 40)
    pyte.Stream(terminal).feed(console.file.getvalue().replace("\n", "\r\n"))
    return [line.strip() for line in terminal.display if line.strip()]


@pytest.mark.parametrize("size", [1, 3, 7, 1000])
def test_markdown_shown_in_pieces_is_the_whole(size, monkeypatch):
    monkeypatch.setattr(view, "_REFRESH_SECONDS", -1)

    def in_pieces(console):
        with AnswerView(console, markdown=True) as answer:
            for i in range(0, len(MARKDOWN), size):
                answer.feed("normal", MARKDOWN[i : i + size])

    assert screen(in_pieces) == screen(lambda console: console.print(Markdown(MARKDOWN)))


def test_reasoning_is_dimmed_and_on_its_own_lines():
    console = Console(file=io.StringIO(), force_terminal=True, width=60)
    with AnswerView(console, markdown=False) as shown:
        for kind, text in [
            ("reasoning", "let me "),
            ("reasoning", "see"),
            ("normal", "\n\nyes"),
            ("normal", ", it is"),
        ]:
            shown.feed(kind, text)
    assert console.file.getvalue() == "\x1b[2mlet me \x1b[0m\x1b[2msee\x1b[0m\nyes, it is\n"
