"""Rotary positions of the draft, with every scaling as Hugging Face defines it.

mlx-lm's YaRN knows no explicit attention_factor, no untruncated range and reads mscale another way, so the draft has
its own. Knows shapes and the rope keys of a config; knows nothing of attention.
Source: transformers, modeling_rope_utils; YaRN, https://arxiv.org/abs/2309.00071.
"""

import math

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.rope_utils import initialize_rope

from .config import DraftConfig


class YarnRope(nn.Module):
    """YaRN: low frequencies are slowed by a factor, high ones are kept, with a ramp between; Q and K are scaled."""

    def __init__(self, config: DraftConfig):
        super().__init__()
        self.dims, self.is_interleaved = config.head_dim, config.is_rope_interleaved
        scaling = config.rope_scaling
        self.attention_factor = yarn_attention_factor(scaling)
        self._freqs = yarn_wavelengths(config.head_dim, config.rope_theta, scaling)

    def __call__(self, x: mx.array, offset: int = 0) -> mx.array:
        """Rotate x (B, heads, S, d) at positions offset to offset + S - 1."""
        x = x * self.attention_factor if self.attention_factor != 1.0 else x
        return mx.fast.rope(
            x, self.dims, traditional=self.is_interleaved, base=None, scale=1.0, offset=offset, freqs=self._freqs
        )


def make_rope(config: DraftConfig) -> nn.Module:
    """Return the module that rotates (B, heads, S, d) with f(x, offset)."""
    if config.rope_scaling and config.rope_scaling["rope_type"] == "yarn":
        return YarnRope(config)
    return initialize_rope(
        config.head_dim,
        config.rope_theta,
        config.is_rope_interleaved,
        config.rope_scaling,
        config.max_position_embeddings,
    )


def yarn_attention_factor(scaling: dict) -> float:
    """Return the factor on Q and K: as given, or from mscale and mscale_all_dim if both are set, or from the factor."""

    def mscale(weight: float) -> float:
        return 0.1 * weight * math.log(scaling["factor"]) + 1.0 if scaling["factor"] > 1 else 1.0

    if scaling.get("attention_factor") is not None:
        return float(scaling["attention_factor"])
    if scaling.get("mscale") and scaling.get("mscale_all_dim"):
        return mscale(scaling["mscale"]) / mscale(scaling["mscale_all_dim"])
    return mscale(1.0)


def yarn_wavelengths(dims: int, theta: float, scaling: dict) -> mx.array:
    """Return (d/2,) float32: for each pair of dimensions, one over the angle by which a position turns it."""

    def pair_that_turns(times: float) -> float:
        original = scaling["original_max_position_embeddings"]
        return dims * math.log(original / (times * 2 * math.pi)) / (2 * math.log(theta))

    low, high = pair_that_turns(scaling.get("beta_fast") or 32), pair_that_turns(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dims - 1)
    if low == high:
        high += 0.001
    slowed = mx.clip((mx.arange(dims // 2, dtype=mx.float32) - low) / (high - low), 0, 1)
    angles = theta ** (mx.arange(0, dims, 2, dtype=mx.float32) / -dims)
    return 1 / (angles * (1 - slowed) + angles / scaling["factor"] * slowed)
