"""Which tokens a reduced head keeps. Knows counts and ids only."""

from collections.abc import Collection

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
