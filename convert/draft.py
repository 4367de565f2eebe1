"""A DFlash draft in any published layout -> MLX folder in z-lab's layout, quantized on request.

Reading, and what a draft must consist of, is the loader's; here is what becomes of the tensors. Runs no model.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten
from tqdm import tqdm

from mlx_dflash.checkpoints.drafts import build_draft, read_draft
from mlx_dflash.checkpoints.packing import unpacked
from mlx_dflash.checkpoints.writing import write_draft
from mlx_dflash.draft.model import DraftModel
from mlx_dflash.files.folders import new_folder, refuse_existing
from mlx_dflash.files.safetensors import cast

from .card import conversion_card


class Quantization(NamedTuple):
    """The way to quantize every weight matrix whose rows divide into groups; None is the mode's own size.

    mode: affine, mxfp4, mxfp8 or nvfp4. recipe: one of mlx-lm's mixtures of bits, or None.
    """

    bits: int | None = None
    group_size: int | None = None
    mode: str = "affine"
    recipe: str | None = None


class Changes(NamedTuple):
    """The differences from the source that are wanted.

    dtype: "float16", "bfloat16" or "float32" for everything that is not packed; None keeps each tensor's own.
    token_ids: ascending ids of the tokens that a reduced head has; None keeps the head.
    """

    dtype: str | None = None
    quantization: Quantization | None = None
    dequantizes: bool = False
    token_ids: Sequence[int] | None = None


UNCHANGED = Changes()


def convert_draft(
    source: str | Path,
    mlx_path: str | Path,
    changes: Changes = UNCHANGED,
    origin: str | None = None,
    progress: bool | None = None,
) -> Path:
    """Convert a local draft folder or GGUF file into the new folder `mlx_path`, and return the new one.

    origin: where the source comes from, for the model card; the path if None. progress: None shows a bar when stderr
    is a terminal. Raises ValueError or FileNotFoundError for an existing folder, missing or damaged files, and what is
    no draft; then no folder is left.
    """
    refuse_existing(mlx_path)
    source = Path(source)
    config, weights = read_draft(source)
    draft = build_draft(config, weights, source)
    if changes.dequantizes:
        draft, config = _dequantized(draft, config, keeps_float32=changes.dtype is not None)
    if changes.dtype:
        _cast(draft, changes.dtype)
    if changes.token_ids is not None:
        config = _reduce_head(draft, config, changes.token_ids)
    if changes.quantization:
        draft, config = _quantized(draft, config, changes.quantization)
    with new_folder(mlx_path) as folder:
        tensors = dict(tree_flatten(draft.parameters()))
        for name in tqdm(tensors, desc="Convert", disable=None if progress is None else not progress):
            mx.eval(tensors[name])
        write_draft(folder, draft, config, conversion_card(Path(mlx_path).name, origin or str(source)))
        mx.eval(build_draft(*read_draft(folder), folder).parameters())
    return Path(mlx_path)


def _dequantized(draft: DraftModel, config: dict[str, Any], keeps_float32: bool) -> tuple[DraftModel, dict[str, Any]]:
    if not config.get("quantization"):
        raise ValueError("the draft is not quantized; leave --dequantize out")
    dtype = str(draft.dtype).rpartition(".")[2]
    draft = unpacked(draft)
    if not keeps_float32:
        _cast(draft, dtype)
    return draft, {k: v for k, v in config.items() if k not in ("quantization", "quantization_config")}


def _cast(draft: DraftModel, dtype: str) -> None:
    """Cast floating parameters, but no packed words. Raises ValueError if a finite value would overflow."""
    flat = [(name, cast(name, weight, dtype)) for name, weight in tree_flatten(draft.parameters())]
    draft.update(tree_unflatten(flat))


def _reduce_head(draft: DraftModel, config: dict[str, Any], token_ids: Sequence[int]) -> dict[str, Any]:
    """Give the draft a head of these tokens: rows of its own head, or of whatever the target's will be."""
    if "d2t" in draft:
        raise ValueError("the draft has a reduced head already")
    ids = mx.array(list(token_ids), mx.int32)
    draft.d2t = ids - mx.arange(ids.size)
    if "lm_head" in draft:
        rows = [(f"lm_head.{name}", value[ids]) for name, value in draft.lm_head.items() if isinstance(value, mx.array)]
        draft.update(tree_unflatten(rows))
    return config | {"draft_vocab_size": ids.size}


def _quantized(
    draft: DraftModel, config: dict[str, Any], quantization: Quantization
) -> tuple[DraftModel, dict[str, Any]]:
    from contextlib import redirect_stdout
    from io import StringIO

    from mlx_lm.convert import mixed_quant_predicate_builder
    from mlx_lm.utils import quantize_model

    bits, group_size, mode, recipe = quantization
    if config.get("quantization"):
        raise ValueError("the draft is quantized already; convert the unquantized one, or --dequantize it first")
    if recipe and mode != "affine":
        raise ValueError(f"--quant-predicate {recipe} needs --q-mode affine, got {mode}")
    if recipe:
        group_size = group_size or 64
    mixed = mixed_quant_predicate_builder(recipe, draft, group_size) if recipe else None

    def predicate(path: str, module: nn.Module) -> bool | dict:
        # The recipes expect a layer's number in second place of every dotted path.
        return mixed(path if path.startswith("layers.") else path.rpartition(".")[2], module) if mixed else True

    before = sum(1 for name, _ in tree_flatten(draft.parameters()) if name.endswith(".scales"))
    with redirect_stdout(StringIO()):
        draft, config = quantize_model(draft, config, group_size, bits, mode=mode, quant_predicate=predicate)
    after = sum(1 for name, _ in tree_flatten(draft.parameters()) if name.endswith(".scales"))
    if after == before:
        used = config["quantization"]["group_size"]
        raise ValueError(
            f"the draft has no matrix whose rows divide into groups of {used}; choose another --q-group-size"
        )
    return draft, {k: v for k, v in config.items() if k != "quantization_config"}
