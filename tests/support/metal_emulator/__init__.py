"""Runs Metal kernels on the CPU and checks every memory access they make.

The kernel text is compiled as C++ with g++ and run thread by thread (a fiber each); out-of-bounds and uninitialised
reads, races, divergent barriers and outputs never written are reported with the line of the kernel. It proves program
logic; it does not prove speed, acceptance by Metal's compiler, or the GPU's last-bit arithmetic.
Needs Linux on x86-64 and g++ 12 or later.
"""

from .launch import Emulator, KernelError, emulate, precompile
from .toolchain import why_unavailable

__all__ = ["Emulator", "KernelError", "emulate", "precompile", "why_unavailable"]
