"""When the rows that a target's attention keeps become quantized.

The rule is that of mlx-lm, for passes of several rows. Knows mlx-lm's caches; knows nothing of models or rounds.
"""

import sys
from dataclasses import dataclass
from typing import Any

from mlx_lm.models.cache import RotatingKVCache


@dataclass(frozen=True)
class KVQuantization:
    """The options kv_bits, kv_group_size and quantized_kv_start of mlx-lm.

    A cache is quantized after the pass that brings it to `start` tokens or more; the rows of later passes are quantized
    as they are appended.
    """

    bits: int
    group_size: int = 64
    start: int = 5000

    def check(self, caches: list[Any]) -> None:
        """Raise ValueError if mlx-lm cannot quantize that way, or cannot quantize one of the caches."""
        if self.bits not in (2, 4, 8):
            raise ValueError(f"kv_bits must be 2, 4 or 8, got {self.bits}")
        if any(isinstance(cache, RotatingKVCache) for cache in caches):
            raise ValueError(
                f"kv_bits = {self.bits}: mlx-lm cannot quantize the KV cache of a sliding window; leave out kv_bits, "
                "and max_kv_size with it"
            )

    def rows_before(self, caches: list[Any], covered: int) -> int:
        """Return the most rows that the next pass may have before caches that cover `covered` tokens are due."""
        waits = any(hasattr(cache, "to_quantized") for cache in caches)
        return max(1, self.start - covered) if waits else sys.maxsize

    def apply(self, caches: list[Any]) -> None:
        """Replace, in place, the caches that are due by quantized ones."""
        for i, cache in enumerate(caches):
            if hasattr(cache, "to_quantized") and cache.offset >= self.start:
                caches[i] = cache.to_quantized(group_size=self.group_size, bits=self.bits)
