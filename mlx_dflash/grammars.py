"""Structured output: logits processors that let only text of a grammar through.

The grammars are llguidance's: JSON schemas, regular expressions, Lark. A processor follows the text token by token; the
dice call it along the kept path only, so drafting changes nothing. Knows tokenizers and masks; knows no models.
"""

import json
from typing import Any

import mlx.core as mx
import numpy as np

from .dice import LogitsProcessor
from .host import read_ids


class Grammars:
    """Makes the processors of one tokenizer. vocab_size: columns of the logits.

    Building one takes about a second; its processors are cheap. Raises ValueError if llguidance is not installed, or
    for a tokenizer that is not a fast one of Hugging Face.
    """

    def __init__(self, tokenizer: Any, vocab_size: int):
        try:
            import llguidance
            import llguidance.hf
        except ModuleNotFoundError as error:
            raise ValueError("structured output needs llguidance: pip install 'mlx-dflash[structured]'") from error
        fast = getattr(tokenizer, "_tokenizer", tokenizer)
        self._matcher = llguidance.LLMatcher
        self._eos = sorted(tokenizer.eos_token_ids)
        self._tokenizer = llguidance.hf.from_tokenizer(fast, n_vocab=vocab_size, eos_token=self._eos)

    def json_object(self, after: tuple[int, ...] = ()) -> LogitsProcessor:
        """Any JSON object. after: see the class GrammarProcessor."""
        return self.json_schema({"type": "object"}, after)

    def json_schema(self, schema: dict | str, after: tuple[int, ...] = ()) -> LogitsProcessor:
        """JSON of a schema, a dict or its text. Raises ValueError for one that is wrong or not supported."""
        try:
            text = schema if isinstance(schema, str) else json.dumps(schema)
            return self._processor(self._matcher.grammar_from_json_schema(text), after)
        except (ValueError, TypeError) as error:
            raise ValueError(f"the JSON schema cannot be used: {error}") from error

    def regex(self, pattern: str, after: tuple[int, ...] = ()) -> LogitsProcessor:
        """Text that matches a regular expression as a whole. Raises ValueError for a wrong one."""
        return self._processor(self._matcher.grammar_from_regex(pattern), after)

    def lark(self, grammar: str, after: tuple[int, ...] = ()) -> LogitsProcessor:
        """Text of a grammar in llguidance's Lark notation. Raises ValueError for a wrong one."""
        return self._processor(self._matcher.grammar_from_lark(grammar), after)

    def _processor(self, grammar: str, after: tuple[int, ...]) -> "GrammarProcessor":
        matcher = self._matcher(self._tokenizer, grammar, log_level=0)
        if matcher.is_error():
            raise ValueError(_reason(matcher))
        return GrammarProcessor(matcher, self._eos, after)


class GrammarProcessor:
    """Lets only text of a grammar through; for one run.

    after: the token ids after which the grammar begins, such as the end of the reasoning; empty for the beginning of
    the text.
    """

    def __init__(self, matcher: Any, eos: list[int], after: tuple[int, ...] = ()):
        self._matcher, self._eos, self._after = matcher, eos, tuple(after)
        self._seen: int | None = None  # tokens of the history that the matcher has read or passed over
        self._recent: list[int] = []

    def __call__(self, tokens: mx.array, logits: mx.array) -> mx.array:
        """Return the logits (1, V) with -inf for what is not allowed. tokens: (T,) the prompt and the text so far."""
        if self._seen is not None:
            for token in read_ids(tokens[self._seen :]):
                self._read(token)
        self._seen = tokens.size
        if self._after:
            return logits
        allowed = self._allowed(logits.shape[-1])
        return mx.where(mx.array(allowed), logits, mx.array(-float("inf"), logits.dtype))

    def _read(self, token: int) -> None:
        if self._after:
            self._recent = [*self._recent, token][-len(self._after) :]
            if tuple(self._recent) == self._after:
                self._after = ()
        elif not self._matcher.is_stopped() and not self._matcher.consume_token(token):
            raise ValueError(f"token {token} does not belong to the grammar's text: {_reason(self._matcher)}")

    def _allowed(self, vocab_size: int) -> np.ndarray:
        """(V,) bool: the tokens that may come next; only the end of the text when the grammar is complete."""
        if self._matcher.is_stopped():
            allowed = np.zeros(vocab_size, dtype=bool)
            allowed[self._eos] = True
            return allowed
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        allowed = np.unpackbits(bits, bitorder="little")[:vocab_size].astype(bool)
        return np.pad(allowed, (0, vocab_size - len(allowed)))


def _reason(matcher: Any) -> str:
    """Why a matcher gave up, in one line, without its inner state."""
    return " ".join(matcher.get_error().partition("<state>")[0].split())
