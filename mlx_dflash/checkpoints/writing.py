"""A draft as a folder in z-lab's layout, with a model card; other engines load it too.

Knows files and what a draft consists of; knows nothing of where the draft comes from but the card it is given.
"""

from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from ..draft.model import DraftModel
from ..files.card import Card, weights_in_words
from ..files.safetensors import cast, write_config, write_tensors


def write_draft(folder: Path, draft: DraftModel, config: dict[str, Any], card: Card, dtype: str | None = None) -> None:
    """Write config.json, the tensors and README.md into a folder.

    config: in z-lab's layout; its dtype becomes that of the tensors. card: the draft's own facts are put before its
    facts. dtype: "float16", "bfloat16" or "float32" of everything that is not packed; None keeps each tensor's own.
    Raises ValueError if a value would overflow.
    """
    tensors = dict(tree_flatten(draft.parameters()))
    if dtype is not None:
        tensors = {name: cast(name, tensor, dtype) for name, tensor in tensors.items()}
    write_tensors(folder, tensors)
    dtype = str(tensors["norm.weight"].dtype).removeprefix("mlx.core.")
    config = {key: value for key, value in config.items() if key != "torch_dtype"} | {"dtype": dtype}
    write_config(folder, config)
    card._replace(facts={**draft_facts(draft, config), **card.facts}).write(folder)


def draft_facts(draft: DraftModel, config: dict[str, Any]) -> dict[str, str]:
    """Return what a model card says about a draft: name -> value."""
    shape = draft.config
    return {
        "kind": f"DFlash {shape.version} draft",
        "layers, hidden size, parameters": f"{shape.num_layers}, {shape.hidden_size}, {_size(draft) / 1e6:.1f} M",
        "heads, KV heads, head size": f"{shape.num_heads}, {shape.num_kv_heads}, {shape.head_dim}",
        "block size": f"{shape.block_size} ({shape.num_drafts} drafts)",
        "tap layers of the target": ", ".join(map(str, shape.target_layer_ids)),
        "mask token": f"{shape.mask_token_id} of {shape.vocab_size}",
        "head": _head_in_words(draft),
        "weights": weights_in_words(config),
    }


def _head_in_words(draft: DraftModel) -> str:
    owner = "its own" if "lm_head" in draft else "the target's"
    return f"{owner}, {draft.d2t.size} tokens" if "d2t" in draft else f"{owner}, every token"


def _size(draft: DraftModel) -> int:
    """Number of parameters that the packed and the plain weights stand for."""
    modules, total = dict(draft.named_modules()), 0
    for name, value in tree_flatten(draft.parameters()):
        module, _, part = name.rpartition(".")
        if part not in ("scales", "biases", "d2t"):
            total += value.size * (32 // modules[module].bits if value.dtype == mx.uint32 else 1)
    return total
