"""DFlash drafts in every published layout: find, read and build.

One path for all drafts: config.json and tensors, each translated to z-lab's names, then checked against the model
that the configuration describes. Knows nothing of targets and of generation.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from ..demo import local_draft
from ..draft.config import DraftConfig
from ..draft.model import DraftModel
from ..files import safetensors as checkpoint
from ..files.gguf import GGUFFile
from ..files.hub import download_draft, draft_folder, file_inside
from ..kernels import Kernels
from ..kernels.record import Record, default_path
from ..models.evaluation import evaluate
from .gguf import gguf_draft_config, gguf_draft_tensors, is_gguf_draft
from .layouts import zlab_layout
from .names import plain_names
from .packing import fit_to_device


def load_draft(
    path_or_hf_repo: str, *, dtype: mx.Dtype | None = None, revision: str | None = None, kernels: str = "auto"
) -> DraftModel:
    """Load a DFlash draft, published or converted, of a folder or hub repository; "demo" names the demo pair's.

    dtype: element type of weights and activations, None for the checkpoint's own. On the CPU, where MLX has no fast
    quantized products, a quantized draft is unpacked, to float32 unless dtype says otherwise.
    kernels: "auto" uses our Metal kernels, for the draft and for its target's verify, where they passed their
    self-check on this machine and are faster; "off" never; "force" unchecked; "check" compares each call with stock
    MLX.
    Raises ValueError that names the key or tensor for anything missing, unknown or not supported.
    """
    path = fetch_draft(path_or_hf_repo, revision)
    draft = build_draft(*read_draft(path), path, Kernels(kernels, Record(default_path())))
    if draft.config.quantization:
        draft = fit_to_device(draft)
    if dtype is not None:
        draft.set_dtype(dtype)
    evaluate(draft)
    draft.fuse_context_projection()
    return draft


def fetch_draft(path_or_hf_repo: str, revision: str | None = None) -> Path:
    """Return where a draft's files are on this machine, downloaded if need be."""
    return local_draft(path_or_hf_repo) or download_draft(path_or_hf_repo, revision)


def read_draft(path: Path) -> tuple[dict[str, Any], dict[str, mx.array]]:
    """Read a draft's folder or GGUF file: config.json in z-lab's layout, and its tensors, lazily, by z-lab's names.

    Raises ValueError or FileNotFoundError that name the file, key or tensor.
    """
    path = file_inside(path)
    if path.is_file():
        gguf = GGUFFile(path)
        if not is_gguf_draft(gguf):
            raise ValueError(f"{path} holds a {gguf.value('general.architecture')!r} model, not a DFlash draft")
        config, tensors = gguf_draft_config(gguf), gguf_draft_tensors(gguf)
    else:
        path = draft_folder(path)
        config = checkpoint.read_config(path)
        if not checkpoint.is_draft_config(config):
            kind = config.get("model_type", "model without model_type")
            raise ValueError(
                f"{path} holds a {kind!r} model, not a DFlash draft; load it with load, or pass it as --model"
            )
        with _named(path):
            config = zlab_layout(config)
        tensors = checkpoint.read_tensors(path)
        _add_mask(path, config, tensors)
    names = plain_names(tensors)
    return _declare(config, names.values()), {plain: tensors[name] for name, plain in names.items()}


def build_draft(
    config_dict: dict[str, Any], weights: dict[str, mx.array], path: Path, kernels: Kernels | None = None
) -> DraftModel:
    """Make the model that a config describes and give it the weights, lazily. path: for messages. kernels: its own.

    Raises ValueError that names a key or tensor for anything missing, unknown or misshapen.
    """
    with _named(path):
        config = DraftConfig.from_dict(config_dict)
    weights = _needed(weights, config)
    _check_sizes(config, weights, path)
    draft = DraftModel(config, {name.split(".")[0] for name in weights} & set(DraftModel.OPTIONAL_PARTS), kernels)
    if config.quantization:
        try:
            _quantize(draft, config.quantization, weights)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{path}: its quantization settings cannot be used: {error}") from error
    _check_weights(draft, weights, path)
    draft.load_weights(list(weights.items()))
    _check_token_ids(draft, path)
    draft.eval()
    return draft


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """Let errors about a config say whose it is."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _check_sizes(config: DraftConfig, weights: dict[str, mx.array], path: Path) -> None:
    """Raise ValueError for sizes that the tensors cannot fill, before anything of that size is made."""
    if config.num_layers > len(weights):
        raise ValueError(f"{path} has num_hidden_layers {config.num_layers}, but no more than {len(weights)} tensors")
    most = 16 * sum(weight.size for weight in weights.values())  # an element holds up to 16 packed numbers
    sizes = {
        "hidden_size": config.hidden_size,
        "target_hidden_size": config.target_hidden_size * len(config.target_layer_ids),
        "intermediate_size": config.intermediate_size,
        "num_attention_heads x head_dim": config.num_heads * config.head_dim,
        "num_key_value_heads x head_dim": config.num_kv_heads * config.head_dim,
        "conv_kernel_size": config.conv_kernel_size or 0,
        "selector_rank": config.selector_rank or 0,
    }
    for key, size in sizes.items():
        if size > most:
            raise ValueError(f"{path}: its {key} asks for {size} numbers in a row, all tensors together have {most}")


def _add_mask(path: Path, config: dict[str, Any], tensors: dict[str, mx.array]) -> None:
    """Add a learned mask vector from its own file, and the mask token's id where only its text is given."""
    vector, token_id = checkpoint.read_mask_embedding(path)
    if vector is not None:
        tensors["mask_embedding"] = vector
    nested = config["dflash_config"]
    if nested.get("mask_token_id", config.get("mask_token_id")) is not None:
        return
    text = nested.get("mask_token")
    if token_id is None and text is not None:
        token_id = checkpoint.find_token(path, text)
    if token_id is None and text is not None:
        raise ValueError(
            f"{path} names its mask token {text!r} but has no tokenizer with it; add mask_token_id to config.json"
        )
    if token_id is not None:
        nested["mask_token_id"] = token_id


def _declare(config: dict[str, Any], names: Any) -> dict[str, Any]:
    """Let the config say what the tensors show: sinks and biases that some exporters do not mention."""
    found = set(names)
    if any(name.endswith(".attention_sink_bias") for name in found):
        config["dflash_config"]["attention_sink_bias"] = True
    if any(name.endswith("_proj.bias") for name in found):
        config["attention_bias"] = True
    return config


def _needed(weights: dict[str, mx.array], config: DraftConfig) -> dict[str, mx.array]:
    """The tensors without copies of the target's embedding and head, as some exports hold them."""
    # A draft of another width, or with fewer tokens, cannot use the target's.
    is_narrower = config.hidden_size != config.target_hidden_size
    kept = {
        "embed_tokens": config.has_own_embedding or is_narrower,
        "lm_head": config.has_own_head or is_narrower or "d2t" in weights,
    }
    needed = {name: tensor for name, tensor in weights.items() if kept.get(name.split(".")[0], True)}
    for name in ("mask_embedding", "d2t"):
        if name in needed:
            needed[name] = needed[name].reshape(-1)
    return needed


def _check_token_ids(draft: DraftModel, path: Path) -> None:
    config = draft.config
    if "d2t" not in draft:
        if config.draft_vocab_size != config.vocab_size:
            raise ValueError(
                f"{path} has a head of {config.draft_vocab_size} of {config.vocab_size} tokens but no d2t, which says "
                "which ones"
            )
        return
    if not mx.issubdtype(draft.d2t.dtype, mx.integer):
        raise ValueError(f"{path}: d2t holds {draft.d2t.dtype}; expected whole numbers")
    ids = (draft.d2t.astype(mx.int64) + mx.arange(draft.d2t.size)).tolist()
    if min(ids) < 0 or max(ids) >= config.vocab_size or len(set(ids)) != len(ids):
        raise ValueError(
            f"{path}: d2t must lead to {len(ids)} different tokens below {config.vocab_size}: row i is token i + d2t[i]"
        )


def _quantize(draft: DraftModel, quantization: dict, weights: dict[str, mx.array]) -> None:
    def settings(path: str, module: nn.Module) -> bool | dict:
        if f"{path}.scales" not in weights:
            return False
        own = quantization.get(path)
        return own if isinstance(own, dict) else True

    nn.quantize(
        draft,
        group_size=quantization.get("group_size"),
        bits=quantization.get("bits"),
        mode=quantization.get("mode", "affine"),
        class_predicate=settings,
    )


def _check_weights(draft: DraftModel, weights: dict[str, mx.array], path: Path) -> None:
    expected = dict(tree_flatten(draft.parameters()))
    missing, unknown = sorted(expected.keys() - weights.keys()), sorted(weights.keys() - expected.keys())
    if missing:
        raise ValueError(f"{path} lacks {len(missing)} tensors of a DFlash draft, among them {', '.join(missing[:5])}")
    if unknown:
        raise ValueError(
            f"{path} holds {len(unknown)} tensors that are not part of a DFlash draft, among them "
            f"{', '.join(unknown[:5])}"
        )
    for name, parameter in expected.items():
        found = weights[name]
        if found.shape != parameter.shape:
            raise ValueError(f"{path}: {name} has shape {found.shape}; the config asks for {parameter.shape}")
        if name != "d2t" and _kind(found) != _kind(parameter):
            raise ValueError(f"{path}: {name} holds {found.dtype}; expected {_kind(parameter)}")


def _kind(tensor: mx.array) -> str:
    """A floating type of any size, or the one type of packed numbers."""
    return "floating numbers" if mx.issubdtype(tensor.dtype, mx.floating) else str(tensor.dtype)
