"""The tokens that a reduced head keeps: special ones, and the most frequent of a text. Knows tokenizers and counts."""

from collections.abc import Collection
from typing import Any

import numpy as np


def frequent(counts: np.ndarray, size: int, special: Collection[int]) -> np.ndarray:
    """Return `size` ids, ascending: the special tokens, then the most frequent, of equally frequent ones the first.

    counts: (V,) how often each token occurs. special: ids, of which those in 0 to V - 1 count. Raises ValueError for a
    size that has no room for the special tokens, or none for any other.
    """
    special = sorted({i for i in special if 0 <= i < len(counts)})
    if not len(special) < size < len(counts):
        raise ValueError(
            f"a reduced vocabulary must have {len(special) + 1} to {len(counts) - 1} tokens, special ones included; "
            f"got {size}"
        )
    ranked = np.argsort(-counts, kind="stable")
    ranked = ranked[~np.isin(ranked, special)]
    return np.array(sorted([*special, *ranked[: size - len(special)]]), np.int64)


def frequent_tokens(tokenizer: Any, size: int, vocab_size: int, text: str | None = None) -> list[int]:
    """Return `size` ids below vocab_size, ascending: special tokens, then by frequency in the text, then by rank.

    Byte-pair tokenizers number their tokens by the rank of their merges, frequent ones first. Raises ValueError for a
    size that has no room for the special tokens, or none for any other.
    """
    ids = tokenizer.encode(text, add_special_tokens=False) if text else []
    counts = np.bincount(np.array([i for i in ids if i < vocab_size], np.int64), minlength=vocab_size)
    return frequent(counts, size, special_tokens(tokenizer)).tolist()


def special_tokens(tokenizer: Any) -> set[int]:
    """Return the ids that a head must not lack: stop tokens, and what the tokenizer calls special or added."""
    stops = getattr(tokenizer, "eos_token_ids", None) or []
    return {*tokenizer.all_special_ids, *tokenizer.get_added_vocab().values(), *stops} - {None}
