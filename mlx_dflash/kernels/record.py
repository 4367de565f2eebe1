"""The verdicts of earlier runs on this machine, in a file.

Verdicts hold for one chip, one macOS, one MLX and one text of the kernels; under any other they are not found. Knows a
file; knows nothing of what a verdict means.
"""

import hashlib
import json
import platform
from pathlib import Path

import mlx.core as mx

from ..files.folders import write_file
from ..files.json_text import read_json
from ..files.places import cache_folder
from .call import metal_source

SOURCES = ("attention.metal", "attention_merge.metal", "matmul.metal")


def environment() -> str:
    """Name everything that a verdict depends on, apart from the shape."""
    text = "".join(metal_source(name) for name in SOURCES)
    chip = mx.device_info()["architecture"]
    kernels = hashlib.sha256(text.encode()).hexdigest()[:12]
    return f"{chip} macOS {platform.mac_ver()[0]} mlx {mx.__version__} kernels {kernels}"


def default_path() -> Path:
    """Where the verdicts are kept unless a caller says otherwise."""
    return cache_folder() / "kernels.json"


class Record:
    """A small JSON file of verdicts, {environment: {shape: verdict}}; path None remembers nothing."""

    def __init__(self, path: Path | None):
        self.path = path

    def find(self, shape: str) -> dict | None:
        """Return the verdict on a shape in this environment, or None."""
        found = self._read()[environment()].get(shape) if self.path else None
        return found if isinstance(found, dict) else None

    def keep(self, shape: str, verdict: dict) -> None:
        """Remember a verdict; the file is replaced whole, so a reader never sees half of it."""
        if self.path is None:
            return
        verdicts = self._read()
        verdicts[environment()][shape] = verdict
        write_file(self.path, json.dumps(verdicts, indent=1))

    def _read(self) -> dict:
        """Return what the file holds, with a place for this environment; a broken file costs a self-check, no more."""
        try:
            found = read_json(self.path)
        except (FileNotFoundError, ValueError):
            found = {}
        own = found.get(environment())
        return found | {environment(): own if isinstance(own, dict) else {}}
