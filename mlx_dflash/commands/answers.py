"""The text of an answer, taken apart while it comes: reasoning, the answer itself, calls of tools.

Knows mlx-lm's state machine of text, and the marks that a tokenizer names; knows nothing of tokens or of what shows
the parts.
"""

from typing import Any

from mlx_lm.generate import TextStateMachine, make_text_state_machine


class AnswerParts:
    """Takes one answer apart.

    kind: of the part that the answer begins with: "normal" or "reasoning"; "tool" is the third.
    """

    def __init__(self, tokenizer: Any, kind: str = "normal"):
        self._state = make_text_state_machine(tokenizer).make_state(kind)

    def take(self, text: str, is_last: bool) -> list[tuple[str, str]]:
        """Add text; return the parts that it belongs to, in order, as (kind, text).

        The marks between the parts are left out. Text that may be the beginning of a mark waits for the next call,
        unless is_last.
        """
        self._state, parts = TextStateMachine.split(self._state, text)
        if is_last:
            self._state, rest, kind = TextStateMachine.flush(self._state)
            parts.append((kind, rest))
        return parts
