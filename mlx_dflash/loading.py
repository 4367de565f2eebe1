"""Checkpoints in: targets through mlx-lm, DFlash drafts from their published folders, and whether two belong together.

Knows files and tensor names; knows nothing of generation.
"""

import json
import re
import weakref
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from .draft.config import DraftConfig
from .draft.model import DraftModel
from .kernels import Kernels
from .kernels.record import Record, default_path
from .target import Structure, check_layer_ids, probe

_DRAFT_FILES = ["*.json", "*.safetensors"]
_SHARD = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.safetensors")


def load(
    path_or_hf_repo: str,
    tokenizer_config: dict[str, Any] | None = None,
    model_config: dict[str, Any] | None = None,
    adapter_path: str | None = None,
    lazy: bool = False,
    return_config: bool = False,
    revision: str | None = None,
    trust_remote_code: bool = False,
):
    """Load a target and its tokenizer, as mlx_lm.load does; "demo" is the target of the demo pair.

    path_or_hf_repo: a local folder or a repository of the Hugging Face hub. Returns (model, tokenizer) or, with
    return_config, (model, tokenizer, config). Raises ValueError for a DFlash draft, FileNotFoundError for no folder.
    """
    import mlx_lm

    path = _demo("target_path") if path_or_hf_repo == "demo" else _local(path_or_hf_repo)
    if path is not None and _is_draft(path):
        raise ValueError(f"{path} holds a DFlash draft, not a target; load it with load_draft, or pass it as --draft-model")
    model, tokenizer, config = mlx_lm.load(
        str(path or path_or_hf_repo),
        tokenizer_config=tokenizer_config,
        model_config=model_config,
        adapter_path=adapter_path,
        lazy=lazy,
        return_config=True,
        revision=revision,
        trust_remote_code=trust_remote_code,
    )
    if path_or_hf_repo == "demo" and mx.default_device().type == mx.DeviceType.cpu:
        # Quantized products are slow on the CPU, where the memory for float32 is no concern.
        from mlx_lm.utils import dequantize_model

        model.set_dtype(mx.float32)  # first the scales: the products must not round to their type
        model = dequantize_model(model)
        mx.eval(model.parameters())
    return (model, tokenizer, config) if return_config else (model, tokenizer)


def load_draft(
    path_or_hf_repo: str, *, dtype: mx.Dtype | None = None, revision: str | None = None, kernels: str = "auto"
) -> DraftModel:
    """Load a DFlash draft from a folder or hub repository as published, or as converted; "demo" is the demo pair's.

    dtype: element type of weights and activations, None for the checkpoint's own. kernels: "auto" uses our Metal
    kernels, for the draft and for its target's verify, where they passed their self-check on this machine and are
    faster; "off" never; "force" unchecked; "check" compares each call with stock MLX.
    Raises ValueError that names the key or tensor for anything missing, unknown or not supported.
    """
    if path_or_hf_repo == "demo":
        path = _demo("draft_path")
        dtype = mx.float32 if dtype is None and mx.default_device().type == mx.DeviceType.cpu else dtype
    else:
        path = _local(path_or_hf_repo) or _download(path_or_hf_repo, revision)
    config_dict = _read_config(path)
    if not _is_draft(path):
        raise ValueError(
            f"{path} holds a {config_dict.get('model_type', 'model without model_type')!r} model, not a DFlash draft; "
            "load it with load, or pass it as --model"
        )
    config = DraftConfig.from_dict(config_dict)
    weights = _draft_weights(_read_weights(path), config, path)
    chooser = Kernels(kernels, Record(default_path()))
    draft = DraftModel(config, has_mask_embedding="mask_embedding" in weights, kernels=chooser)
    if config.quantization:
        _quantize(draft, config.quantization, weights)
    _check_weights(draft, weights, path)
    draft.load_weights(list(weights.items()))
    if dtype is not None:
        draft.set_dtype(dtype)
    draft.eval()
    draft.fuse_context_projection()
    # Nothing stays to be computed: another thread, which has other streams, could not.
    mx.eval(draft.parameters())
    return draft


def check_pair(model: nn.Module, draft: DraftModel) -> Structure:
    """Check that a draft can read a target's hidden states and share its vocabulary; return the target's structure.

    Raises ValueError that names both sides. The answer is remembered with the draft for the latest target.
    """
    remembered = getattr(draft, "_checked_target", None)
    structure = Structure(model)
    if remembered is not None and remembered() is model:
        return structure
    config = draft.config
    check_layer_ids(config.target_layer_ids, len(structure.layers))
    if config.num_target_layers not in (None, len(structure.layers)):
        raise ValueError(
            f"the draft was trained for a target of {config.num_target_layers} layers, this target has {len(structure.layers)}"
        )
    if config.vocab_size != structure.vocab_size:
        raise ValueError(f"the draft has a vocabulary of {config.vocab_size} tokens, the target one of {structure.vocab_size}")
    row = structure.embed(mx.array([[0]]))
    if row.shape[-1] != config.hidden_size:
        raise ValueError(f"the draft's hidden size is {config.hidden_size}, the target's embedding has width {row.shape[-1]}")
    width = probe(model, config.target_layer_ids)
    if width != config.target_hidden_size:
        raise ValueError(f"the draft expects hidden states of width {config.target_hidden_size}, the target's layers give {width}")
    draft._checked_target = weakref.ref(model)
    return structure


def _demo(part: str) -> Path:
    from . import demo

    return getattr(demo, part)()


def _local(path_or_hf_repo: str) -> Path | None:
    """The local folder, or None for what can only be a hub repository, NAME or OWNER/NAME."""
    path = Path(path_or_hf_repo).expanduser()
    if path.is_dir():
        return path
    if path.exists():
        raise ValueError(f"{path} is a file; expected a model folder or a repository of the Hugging Face hub")
    if str(path_or_hf_repo).startswith((".", "/", "~")) or str(path_or_hf_repo).count("/") > 1:
        raise FileNotFoundError(f"there is no folder {path}")
    return None


def _download(repo: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError

    try:
        return Path(snapshot_download(repo, revision=revision, allow_patterns=_DRAFT_FILES))
    except GatedRepoError as error:
        raise ValueError(f"{repo} is gated: accept its terms at https://huggingface.co/{repo} and run `hf auth login`") from error
    except LocalEntryNotFoundError as error:
        raise ValueError(f"{repo} is neither a local folder nor in the hub's cache, and the hub cannot be reached") from error
    except RepositoryNotFoundError as error:
        raise ValueError(f"{repo} is neither a local folder nor a repository of the hub that you may read") from error


def _read_config(path: Path) -> dict[str, Any]:
    file = path / "config.json"
    if not file.is_file():
        raise FileNotFoundError(f"{path} has no config.json; expected a model folder")
    try:
        config = json.loads(file.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"{file} must hold a JSON object, got {type(config).__name__}")
    return config


def _is_draft(path: Path) -> bool:
    config = _read_config(path)
    named = "DFlash" in "".join(map(str, config.get("architectures") or []))
    return named or "dflash_config" in config or "speculators_model_type" in config


def _read_weights(path: Path) -> dict[str, mx.array]:
    """All tensors of a folder's safetensors: those its index names, or the one file, or one whole set of shards."""
    index = path / "model.safetensors.index.json"
    if index.is_file():
        mapping = json.loads(index.read_text()).get("weight_map", {})
        files = [path / name for name in sorted(set(mapping.values()))]
    else:
        files, mapping = sorted(path.glob("*.safetensors")), None
    absent = [f.name for f in files if not f.is_file()]
    if absent or not files:
        raise FileNotFoundError(f"{path} lacks {', '.join(absent) or 'safetensors files'}")
    if mapping is None and len(files) > 1:
        _check_shards(files)
    weights: dict[str, mx.array] = {}
    for file in files:
        try:
            tensors = mx.load(str(file))
        except RuntimeError as error:
            raise ValueError(f"{file} is not a readable safetensors file: {error}") from error
        weights |= tensors if mapping is None else {k: v for k, v in tensors.items() if mapping.get(k) == file.name}
    lost = sorted(set(mapping or ()) - set(weights))
    if lost:
        raise ValueError(f"{index} promises tensors that its files do not hold: {', '.join(lost[:5])}")
    return weights


def _check_shards(files: list[Path]) -> None:
    parts = [_SHARD.fullmatch(f.name) for f in files]
    names = {(m[1], int(m[3])) for m in parts if m}
    if None in parts or len(names) != 1:
        raise ValueError(f"cannot tell which of {', '.join(f.name for f in files)} to load; expected one file, or an index")
    total = names.pop()[1]
    missing = sorted(set(range(1, total + 1)) - {int(m[2]) for m in parts})
    if missing:
        raise FileNotFoundError(f"{files[0].parent} lacks shards {missing} of {total}")


def _draft_weights(tensors: dict[str, mx.array], config: DraftConfig, path: Path) -> dict[str, mx.array]:
    """The tensors under the names of DraftModel, without the spare copies of what the target lends."""
    if (path / "mask_embedding.pt").exists():
        raise ValueError(f"{path / 'mask_embedding.pt'} holds a learned mask embedding in a format that is not supported")
    weights = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    for name in ("d2t", "t2d"):
        if name in weights:
            raise ValueError(f"{path} has a tensor {name}: drafts with a reduced vocabulary are not supported")
    spare = ("embed_tokens.", "lm_head.", "rotary_emb.")
    weights = {name: t for name, t in weights.items() if not name.startswith(spare) and "rotary_emb.inv_freq" not in name}
    if "mask_embedding" in weights:
        weights["mask_embedding"] = weights["mask_embedding"].reshape(-1)
    return weights


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
        raise ValueError(f"{path} holds {len(unknown)} tensors that are not part of a DFlash draft, among them {', '.join(unknown[:5])}")
    for name, parameter in expected.items():
        if weights[name].shape != parameter.shape:
            raise ValueError(f"{path}: {name} has shape {weights[name].shape}; the config asks for {parameter.shape}")
