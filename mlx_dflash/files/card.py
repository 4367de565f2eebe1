"""The model card of a folder. Knows text only."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple


class Card(NamedTuple):
    """The text of a model's README.md: title, text, facts as lines of a table.

    base_model: OWNER/NAME of the model that this one was made of, or None.
    """

    title: str
    text: str
    facts: Mapping[str, Any] = {}
    base_model: str | None = None

    def write(self, folder: Path) -> None:
        """Write README.md, with what the hub needs to know at its top."""
        base = f"base_model: {self.base_model}\n" if self.base_model else ""
        table = "".join(f"| {key} | {value} |\n" for key, value in self.facts.items())
        head = f"---\nlibrary_name: mlx\n{base}tags: [mlx, dflash, speculative-decoding]\n---\n\n"
        readme = f"{head}# {self.title}\n\n{self.text}\n\n| | |\n|---|---|\n{table}"
        (folder / "README.md").write_text(readme, encoding="utf-8")


def weights_in_words(config: Mapping[str, Any]) -> str:
    """Say how the weights of a config.json are packed."""
    packing = config.get("quantization")
    if not packing:
        return "not quantized"
    return f"{packing['bits']} bits, groups of {packing['group_size']}, {packing.get('mode', 'affine')}"
