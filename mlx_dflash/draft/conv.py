"""Grouped dynamic causal convolution, which DFlash 2 puts around the attention and the MLP of every layer.

It mixes each row of a block with the few rows before it, by taps that depend on the row. It looks back inside the block
only; the draft's context rows do not pass through it. Knows nothing of attention.
"""

import mlx.core as mx
import mlx.nn as nn


class GroupedDynamicConv(nn.Module):
    """Two convolutions, before and after a sublayer, whose dynamic taps come from the sublayer's input.

    base_kernel: (2, k, H): side (before, after), tap, channel. Tap 0 is the row itself, tap t the row t before it.
    kernel_projection gives such taps for each row, with one value for each group of g channels.
    """

    def __init__(self, hidden_size: int, kernel_size: int, group_size: int):
        super().__init__()
        self.group_size = group_size
        self.base_kernel = mx.zeros((2, kernel_size, hidden_size))
        self.kernel_projection = nn.Linear(hidden_size, 2 * kernel_size * (hidden_size // group_size), bias=False)

    def kernels(self, x: mx.array) -> mx.array:
        """Return the taps (2, k, L, H) of both sides. x: (1, L, H), the normed input of the sublayer."""
        _, L, H = x.shape
        k, g = self.base_kernel.shape[1], self.group_size
        dynamic = self.kernel_projection(x).reshape(L, 2, k, H // g).transpose(1, 2, 0, 3)  # (2, k, L, H/g)
        return self.base_kernel[:, :, None].astype(x.dtype) + mx.repeat(dynamic, g, axis=-1)


def convolve(x: mx.array, kernel: mx.array) -> mx.array:
    """Mix each row of x (1, L, H) with the rows before it. kernel: (k, L, H). Rows before row 0 count as zero."""
    out = kernel[0] * x
    for tap in range(1, min(len(kernel), x.shape[1])):
        out = out + kernel[tap] * mx.pad(x[:, :-tap], ((0, 0), (tap, 0), (0, 0)))
    return out
