"""A trained draft as a folder in z-lab's layout, with a model card; other engines load it too.

Knows files and the draft's tensor names; knows nothing of training but the facts it is told.
"""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

import mlx_dflash

from ..draft.model import DraftModel
from ..files.card import card
from ..files.folders import replaced_folder
from .files import save_arrays


def save_draft(
    folder: Path, draft: DraftModel, config: dict[str, Any], facts: dict[str, Any], dtype: str = "bfloat16"
) -> None:
    """Write config.json, model.safetensors and README.md, in place of an older folder. dtype: of the matrices and norms."""
    element = getattr(mx, dtype)
    weights = {
        name: value.astype(element) if mx.issubdtype(value.dtype, mx.floating) else value
        for name, value in tree_flatten(draft.parameters())
    }
    with replaced_folder(folder) as part:
        save_arrays(part / "model.safetensors", weights)
        config = {key: value for key, value in config.items() if key != "torch_dtype"} | {"dtype": dtype}
        (part / "config.json").write_text(json.dumps(dict(sorted(config.items())), indent=4) + "\n")
        (part / "README.md").write_text(_card(draft, facts), encoding="utf-8")


def _card(draft: DraftModel, facts: dict[str, Any]) -> str:
    config = draft.config
    size = sum(value.size for name, value in tree_flatten(draft.parameters()) if name != "d2t")
    table = {
        "layers, hidden size, parameters": f"{config.num_layers}, {config.hidden_size}, {size / 1e6:.1f} M",
        "block size": f"{config.block_size}, the anchor included",
        "tap layers of the target": ", ".join(map(str, config.target_layer_ids)),
        "mask token": config.mask_token_id,
    }
    if config.draft_vocab_size != config.vocab_size:
        table["tokens of the reduced head"] = f"{config.draft_vocab_size} of {config.vocab_size}"
    text = (
        "A DFlash draft network. It proposes blocks of tokens; the target decides what is kept, so the text is the target's own.\n"
        f"Trained with mlx_dflash {mlx_dflash.__version__}."
    )
    command = f"    python -m mlx_dflash.generate --model {facts['target']} --draft-model THIS_FOLDER --prompt hello\n"
    return card(f"DFlash draft for {facts['target']}", text, {**table, **facts}) + "\n" + command
