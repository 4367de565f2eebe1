"""The text of a model card. Knows text only."""

from collections.abc import Mapping
from typing import Any


def card(title: str, text: str, facts: Mapping[str, Any], base_model: str | None = None) -> str:
    """Return a README.md for the hub: what the hub needs to know, the text, and the facts as a table.

    base_model: OWNER/NAME of the model that this one was made of, or None.
    """
    base = f"base_model: {base_model}\n" if base_model else ""
    table = "".join(f"| {key} | {value} |\n" for key, value in facts.items())
    head = f"---\nlibrary_name: mlx\n{base}tags: [mlx, dflash, speculative-decoding]\n---\n\n"
    return f"{head}# {title}\n\n{text}\n\n| | |\n|---|---|\n{table}"
