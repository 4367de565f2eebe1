"""A trained draft on the disk, with a model card that says how it was trained. Knows no format of files."""

from pathlib import Path
from typing import Any

import mlx_dflash

from ..checkpoints.writing import write_draft
from ..draft.model import DraftModel
from ..files.card import Card
from ..files.folders import replaced_folder

_TEXT = """A DFlash draft network. It proposes blocks of tokens; the target decides what is kept, so the text is the
target's own. Trained with mlx_dflash {version}.

    python -m mlx_dflash.generate --model {target} --draft-model THIS_FOLDER --prompt hello"""


def save_draft(
    folder: Path, draft: DraftModel, config: dict[str, Any], facts: dict[str, Any], dtype: str = "bfloat16"
) -> None:
    """Write a draft's folder in place of an older one. facts: with the target. dtype: of the matrices and norms."""
    target = facts["target"]
    text = _TEXT.format(version=mlx_dflash.__version__, target=target)
    with replaced_folder(folder) as part:
        write_draft(part, draft, config, Card(f"DFlash draft for {target}", text, facts), dtype)
