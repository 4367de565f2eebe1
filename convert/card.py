"""The model card of a conversion: where the weights come from and what was made of them. Knows text only."""

import re
from pathlib import Path

import mlx.core as mx

import mlx_dflash
from mlx_dflash.files.card import card


def write_card(folder: Path, name: str, origin: str, facts: dict[str, str]) -> None:
    """Write README.md. origin: path, or OWNER/NAME@REVISION of the hub. facts: lines of its table."""
    repo = origin.partition("@")[0]
    text = f"Converted from {origin} with mlx_dflash {mlx_dflash.__version__} (mlx {mx.__version__}). The license is the source's."
    base_model = repo if re.fullmatch(r"[\w.-]+/[\w.-]+", repo) else None
    (folder / "README.md").write_text(card(name, text, facts, base_model), encoding="utf-8")


def origin_of(source: str, folder: Path) -> str:
    """Name a source for its card: a repository of the hub with the commit it was downloaded at, or the path."""
    parts = folder.parts
    if Path(source).exists() or "snapshots" not in parts:
        return source
    return f"{source}@{parts[parts.index('snapshots') + 1]}"
