"""Kernels broken on purpose: every one of these changes must be noticed by the emulator or by the result."""
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from metal_emulator import emulate, precompile, why_unavailable

from mlx_dflash.kernels.attention import Keys, Sight, merge_call, partial_call, plan

pytestmark = pytest.mark.skipif(why_unavailable() is not None, reason=str(why_unavailable()))

ATTENTION = [  # of attention.metal: text, what it becomes
    ("vraw", "vraw"),
]
