"""This machine, in one description for every command that states it.

Knows MLX and the operating system; knows nothing of models.
"""

import os
import platform
from dataclasses import dataclass
from importlib import metadata

import mlx.core as mx

from ..blas import blas_in_use

_PACKAGES = ("mlx", "mlx-lm", "numpy", "huggingface-hub")


@dataclass(frozen=True)
class Machine:
    """A machine and the software that numbers measured on it depend on.

    system: as "Linux" or "Darwin"; macos: its version, "" elsewhere. processor: as "arm64"; chip: as "Apple M3 Max".
    device: "gpu" or "cpu", where MLX computes. architecture: of that device, in MLX's words. memory_bytes: what models
    may take, the GPU's working set or the whole memory. versions: of packages. blas: see blas_in_use.
    """

    system: str
    platform: str
    macos: str
    processor: str
    chip: str
    architecture: str
    device: str
    has_metal: bool
    memory_bytes: int
    python: str
    versions: dict[str, str]
    blas: str | None


def this_machine() -> Machine:
    """Describe the machine that this process runs on."""
    info, has_metal = mx.device_info(), mx.metal.is_available()
    return Machine(
        system=platform.system(),
        platform=platform.platform(),
        macos=platform.mac_ver()[0],
        processor=platform.machine(),
        chip=str(info.get("device_name", "")),
        architecture=str(info.get("architecture", "")),
        device=str(mx.default_device().type).rpartition(".")[2],
        has_metal=has_metal,
        memory_bytes=int(info["max_recommended_working_set_size"]) if has_metal else _all_memory(),
        python=platform.python_version(),
        versions={name: _version(name) for name in _PACKAGES},
        blas=blas_in_use(),
    )


def _all_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"
