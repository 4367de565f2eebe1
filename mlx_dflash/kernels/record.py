"""What self-checks found on this machine, remembered between runs.

Verdicts hold for one chip, one macOS, one MLX and one text of the kernels; under any other they are not found. Knows a
file; knows nothing of what a verdict means.
"""

import hashlib
import json
import os
import platform
import tempfile
from pathlib import Path

import mlx.core as mx

from .call import metal_source

SOURCES = ("attention.metal", "attention_merge.metal", "matmul.metal")


def environment() -> str:
    """What a verdict depends on besides the shape."""
    text = "".join(metal_source(name) for name in SOURCES)
    chip = mx.device_info()["architecture"]
    kernels = hashlib.sha256(text.encode()).hexdigest()[:12]
    return f"{chip} macOS {platform.mac_ver()[0]} mlx {mx.__version__} kernels {kernels}"


def default_path() -> Path:
    """The file in the user's cache directory, beside the other things this package keeps there."""
    from huggingface_hub.constants import default_home

    return Path(default_home) / "mlx_dflash" / "kernels.json"


class Record:
    """A small JSON file of verdicts, {environment: {shape: verdict}}; path None remembers nothing."""

    def __init__(self, path: Path | None):
        self.path = path

    def find(self, shape: str) -> dict | None:
        """The verdict on a shape in this environment, or None."""
        return self._read().get(environment(), {}).get(shape) if self.path else None

    def keep(self, shape: str, verdict: dict) -> None:
        """Remember a verdict; the file is replaced whole, so a reader never sees half of it."""
        if self.path is None:
            return
        verdicts = self._read()
        verdicts.setdefault(environment(), {})[shape] = verdict
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=self.path.parent, delete=False) as file:
            json.dump(verdicts, file, indent=1)
        os.replace(file.name, self.path)

    def _read(self) -> dict:
        try:
            return json.loads(self.path.read_text())
        except (FileNotFoundError, json.JSONDecodeError):  # a broken file costs a self-check, nothing else
            return {}
