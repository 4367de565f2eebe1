"""A Metal launch as data.

A KernelCall holds all that mx.fast.metal_kernel needs, so that something other than a GPU can inspect and run a launch.
Knows nothing of attention or of products.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import resources

import mlx.core as mx


@dataclass(frozen=True)
class KernelCall:
    """One launch of a kernel body, with the arguments of mx.fast.metal_kernel and of the call it returns.

    grid counts threads, not threadgroups; every axis is a multiple of threadgroup's. Inputs arrive with their own
    strides: the body asks for them by name (q_strides), so nothing is copied to make it contiguous.
    """

    name: str
    source: str
    inputs: dict[str, mx.array]
    outputs: dict[str, tuple[tuple[int, ...], mx.Dtype]]  # name -> shape, dtype
    template: dict[str, object]
    grid: tuple[int, int, int]
    threadgroup: tuple[int, int, int]


Runner = Callable[[KernelCall], list[mx.array]]  # executes a launch: a MetalRunner, or an emulator in tests


@cache
def metal_source(name: str) -> str:
    """Read the text of a kernel body that ships with this package, such as "attention.metal"."""
    return resources.files(__package__).joinpath(name).read_text()


class MetalRunner:
    """Runs launches on the GPU, and keeps the kernels that it has made, one for each name and body."""

    def __init__(self):
        self._made = {}

    def __call__(self, call: KernelCall) -> list[mx.array]:
        """Enqueue the launch and return its outputs in order (lazy, like any MLX operation)."""
        kernel = self._made.get((call.name, call.source))
        if kernel is None:
            kernel = self._made[call.name, call.source] = mx.fast.metal_kernel(
                name=call.name,
                input_names=list(call.inputs),
                output_names=list(call.outputs),
                source=call.source,
                ensure_row_contiguous=False,
            )
        shapes, dtypes = zip(*call.outputs.values())
        return kernel(
            inputs=list(call.inputs.values()),
            template=list(call.template.items()),
            grid=call.grid,
            threadgroup=call.threadgroup,
            output_shapes=list(shapes),
            output_dtypes=list(dtypes),
        )
