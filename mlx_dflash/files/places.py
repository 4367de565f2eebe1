"""Where this package keeps things of its own on the user's disk. Knows one folder, and nothing of what is in it."""

from pathlib import Path


def cache_folder() -> Path:
    """Return the folder for what can be made again, in the directory that the hub's client takes for caches.

    It need not exist.
    """
    from huggingface_hub.constants import default_home

    return Path(default_home) / "mlx_dflash"
