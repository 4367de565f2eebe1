"""The model card of a conversion: where the weights come from and what was made of them. Knows text only."""

import re
from collections.abc import Mapping
from pathlib import Path

import mlx.core as mx

import mlx_dflash
from mlx_dflash.files.card import Card


def conversion_card(name: str, origin: str, facts: Mapping[str, str] = {}) -> Card:
    """Return the card of a folder. origin: path, or OWNER/NAME@REVISION of the hub. facts: lines of its table."""
    repo = origin.partition("@")[0]
    made = f"Converted from {origin} with mlx_dflash {mlx_dflash.__version__} (mlx {mx.__version__})."
    base_model = repo if re.fullmatch(r"[\w.-]+/[\w.-]+", repo) else None
    return Card(name, f"{made} The license is the source's.", facts, base_model)


def origin_of(source: str, folder: Path) -> str:
    """Name a source for its card: a repository of the hub with the commit it was downloaded at, or the path."""
    parts = folder.parts
    if Path(source).exists() or "snapshots" not in parts:
        return source
    return f"{source}@{parts[parts.index('snapshots') + 1]}"
