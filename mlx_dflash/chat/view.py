"""Shows an answer while it comes: plain text, or Markdown where the terminal can. Knows rich; knows no models."""

import time
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.markdown import Markdown
from rich.segment import Segment
from rich.text import Text

_REFRESH_SECONDS = 0.1


class _Tail:
    """The unfinished end of a Markdown text, as many of its last lines as fit on the screen."""

    def __init__(self):
        self.text = ""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines = console.render_lines(Markdown(self.text), options.update(height=None), pad=False)
        for line in lines[-max(1, console.height - 2) :]:
            yield from line
            yield Segment.line()


class AnswerView:
    """One answer on the screen.

    markdown: show finished paragraphs, lists and code blocks rendered, and the unfinished one live below them.
    Use as a context manager, so that the screen is right again whatever happens.
    """

    def __init__(self, console: Console, markdown: bool):
        self._console = console
        self._markdown = markdown and console.is_terminal and not console.is_dumb_terminal
        self._kind, self._tail, self._live, self._shown_at = "normal", _Tail(), None, 0.0
        self._is_line_open = False

    def __enter__(self) -> "AnswerView":
        return self

    def __exit__(self, *error: Any) -> None:
        self._finish_block(self._tail.text)
        self._close_line()

    def feed(self, kind: str, text: str) -> None:
        """Show more of the answer: "reasoning" is dimmed, "normal" and "tool" are the answer itself."""
        if kind != self._kind:
            self._finish_block(self._tail.text)
            self._close_line()
            self._kind, text = kind, text.lstrip("\n")
        if kind == "reasoning" or not self._markdown:
            self._write(text, "dim" if kind == "reasoning" else "")
            return
        self._tail.text += text
        if "\n" in text:
            self._finish_block(self._tail.text[: _finished(self._tail.text)])
        self._show_tail()

    def _write(self, text: str, style: str) -> None:
        if text:
            self._console.print(Text(text, style=style), end="", soft_wrap=True, highlight=False)
            self._is_line_open = not text.endswith("\n")

    def _close_line(self) -> None:
        if self._is_line_open:
            self._console.print()
            self._is_line_open = False

    def _show_tail(self) -> None:
        if not self._tail.text.strip():
            return
        if self._live is None:
            self._live = Live(
                self._tail, console=self._console, auto_refresh=False, transient=True, vertical_overflow="visible"
            )
            self._live.start()
        if time.monotonic() - self._shown_at > _REFRESH_SECONDS:
            self._live.refresh()
            self._shown_at = time.monotonic()

    def _finish_block(self, block: str) -> None:
        """Print a finished part of the Markdown for good."""
        if self._live is not None and (block or not self._tail.text):
            self._live.stop()
            self._live = None
        if block.strip():
            self._console.print(Markdown(block))
            if _ends_block(block):
                self._console.print()
        self._tail.text = self._tail.text[len(block) :]


def _ends_block(block: str) -> bool:
    return block.endswith("\n\n")


def _finished(text: str) -> int:
    """Number of characters of text that belong to blocks which more text cannot change."""
    from markdown_it import MarkdownIt

    starts = [token.map[0] for token in MarkdownIt().parse(text) if token.level == 0 and token.map]
    # The last block is still open, but for a blank line behind a paragraph, which begins a new block.
    lines = text.splitlines(keepends=True)
    return sum(map(len, lines[: starts[-1]])) if len(starts) > 1 else 0
