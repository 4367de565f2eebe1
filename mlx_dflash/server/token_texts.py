"""The text of single tokens: their bytes, and how the log-probabilities of an answer name them.

Knows how tokenizers write tokens: bytes as characters (byte-level BPE), or a mark for the space and <0xNN> for a byte
(SentencePiece). Knows nothing of the API.
"""

import re
from codecs import getincrementaldecoder
from functools import lru_cache
from typing import Any

_SPACE_MARK = "\u2581"
_BYTE = re.compile("<0x([0-9A-Fa-f]{2})>")


class TokenTexts:
    """The bytes of a tokenizer's tokens. tokenizer: mlx-lm's wrapper."""

    def __init__(self, tokenizer: Any):
        self._tokenizer, vocabulary = tokenizer, tokenizer.get_vocab()
        self._literal = set(tokenizer.get_added_vocab().values())
        marks_spaces = vocabulary.get(_SPACE_MARK, -1) not in {-1, *self._literal} or "<0x0A>" in vocabulary
        self._is_byte_level = not marks_spaces and chr(256 + ord(" ")) in vocabulary
        self._marks_spaces = marks_spaces

    def bytes_of(self, id: int) -> bytes | None:
        """Return the bytes that a token adds to a text, None if it ends the text or has none."""
        token = self._tokenizer.convert_ids_to_tokens(id)
        if token is None or id in self._tokenizer.eos_token_ids:
            return None
        if id not in self._literal:
            if self._marks_spaces and (byte := _BYTE.fullmatch(token)):
                return bytes.fromhex(byte[1])
            if self._marks_spaces:
                token = token.replace(_SPACE_MARK, " ")
            elif self._is_byte_level:
                return b"".join(_bytes_of_characters().get(c) or c.encode() for c in token)
        return token.encode()

    def name(self, id: int) -> str:
        """Return the token's text, or, for parts of characters, its bytes as OpenAI writes them."""
        data = self.bytes_of(id)
        if data is None:
            return self._tokenizer.convert_ids_to_tokens(id) or ""
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


class Offsets:
    """Where the tokens of a text begin, in characters; tokens that are parts of one character share its place."""

    def __init__(self):
        self._decoder, self._num_characters = getincrementaldecoder("utf-8")("replace"), 0

    def add(self, data: bytes | None) -> int:
        """Add a token's bytes; return its place."""
        offset = self._num_characters
        self._num_characters += len(self._decoder.decode(data or b""))
        return offset


@lru_cache(maxsize=1)
def _bytes_of_characters() -> dict[str, bytes]:
    """Return the byte that each character of a byte-level token stands for.

    Printable bytes stand for themselves, the others are numbered from 256 on. Source: byte-level BPE of GPT-2.
    """
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = sorted(set(range(256)) - set(printable))
    return {chr(b): bytes([b]) for b in printable} | {chr(256 + i): bytes([b]) for i, b in enumerate(others)}
