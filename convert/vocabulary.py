"""Which tokens a reduced head keeps: the most frequent of a text, or the first of the tokenizer. Knows tokenizers only."""

from pathlib import Path
from typing import Any

import numpy as np

from mlx_dflash.checkpoints.vocabulary import frequent
from mlx_dflash.demo import local_target


def frequent_tokens(tokenizer: Any, size: int, vocab_size: int, text: str | None = None) -> list[int]:
    """Return `size` ids below vocab_size, ascending: special tokens, then by frequency in the text, then by rank.

    Byte-pair tokenizers number their tokens by the rank of their merges, frequent ones first. Raises ValueError for a
    size that has no room for the special tokens, or none for any other.
    """
    special = {*tokenizer.all_special_ids, *tokenizer.get_added_vocab().values(), *_stop_ids(tokenizer)} - {None}
    ids = tokenizer.encode(text, add_special_tokens=False) if text else []
    counts = np.bincount(np.array([i for i in ids if i < vocab_size], np.int64), minlength=vocab_size)
    return frequent(counts, size, special).tolist()


def target_tokenizer(target: str) -> Any:
    """Load the tokenizer of a target: a folder, a repository of the hub, or "demo"."""
    from mlx_lm.tokenizer_utils import load as load_tokenizer
    from mlx_lm.utils import _download

    path = local_target(target)
    return load_tokenizer(
        path or Path(_download(target, allow_patterns=["*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken"]))
    )


def _stop_ids(tokenizer: Any) -> list[int]:
    return list(getattr(tokenizer, "eos_token_ids", None) or [])
