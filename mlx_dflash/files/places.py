"""Where this package keeps things of its own on the user's disk. Knows one folder, and nothing of what is in it."""

import os
from pathlib import Path


def cache_folder() -> Path:
    """Return the folder for what can be made again: in XDG_CACHE_HOME, or else where the hub's client keeps caches.

    It need not exist.
    """
    from huggingface_hub.constants import default_home

    return Path(os.environ.get("XDG_CACHE_HOME") or default_home) / "mlx_dflash"
