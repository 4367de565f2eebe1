"""Hugging Face DFlash draft folder -> MLX folder, quantized on request.

Tensors keep their names (z-lab's). Knows which files hold them and how MLX names quantized matrices; what a draft must
consist of is the loader's knowledge, asked at the end. Runs no model.
"""

import json
from pathlib import Path
from typing import NamedTuple

import mlx.core as mx
from tqdm import tqdm

from .output import cast, new_folder, refuse_existing, write_config, write_weights

INDEX = "model.safetensors.index.json"


class Quantization(NamedTuple):
    """Affine quantization of every weight matrix whose rows divide into groups."""

    bits: int = 4
    group_size: int = 64


def convert_draft(
    hf_path: str | Path,
    mlx_path: str | Path,
    dtype: str | None = None,
    quantization: Quantization | None = None,
    progress: bool | None = None,
) -> Path:
    """Convert a local DFlash draft folder into the new folder `mlx_path`, and return the new one.

    dtype: "float16", "bfloat16" or "float32" for everything that is not packed; None keeps each tensor's own.
    progress: None shows a bar when stderr is a terminal.
    Raises ValueError for an existing folder, missing or damaged files, and a folder that is no draft; then no folder
    is left.
    """
    refuse_existing(mlx_path)
    source = Path(hf_path)
    config = read_config(source)
    if not is_draft_config(config):
        raise ValueError(f"{source} is not a DFlash draft: its config.json has no dflash_config")
    if "quantization" in config or "quantization_config" in config:
        raise ValueError(f"{source} is quantized already; convert the unquantized draft")
    weights = read_weights(source)
    if quantization and not any(_can_pack(w, quantization) for w in weights.values()):
        raise ValueError(f"no matrix of {source} has rows that divide into groups of {quantization.group_size}")
    with new_folder(mlx_path) as folder:
        converted = {}
        for name, weight in tqdm(weights.items(), desc="Convert", disable=None if progress is None else not progress):
            weight = cast(name, weight, dtype) if dtype else weight
            converted |= _packed(name, weight, quantization)
        write_weights(folder, converted)
        write_config(folder, _new_config(config, dtype, quantization))
        _check_loads(folder, source)
    return Path(mlx_path)


def is_draft_config(config: dict) -> bool:
    """Say whether config.json describes a DFlash draft."""
    return "dflash_config" in config or any("DFlash" in name for name in config.get("architectures") or [])


def read_config(folder: Path) -> dict:
    """Read config.json; ValueError if there is none."""
    path = folder / "config.json"
    if not path.is_file():
        raise ValueError(f"{folder} has no config.json; expected a model folder")
    return json.loads(path.read_text(encoding="utf-8"))


def read_weights(folder: Path) -> dict[str, mx.array]:
    """Read every tensor of the folder's safetensors, lazily.

    With an index, exactly the files and the tensors that it lists. Raises ValueError naming a file or tensor that is
    missing, and a tensor that two files hold.
    """
    listed = {}
    if (folder / INDEX).is_file():
        listed = json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"]
    files = sorted(set(listed.values())) or sorted(path.name for path in folder.glob("*.safetensors"))
    if not files:
        raise ValueError(f"{folder} has no .safetensors files; other weight files are not read")
    weights = {}
    for file in files:
        if not (folder / file).is_file():
            raise ValueError(f"{folder} lacks {file}, which {INDEX} lists; download it again")
        for name, weight in mx.load(str(folder / file)).items():
            if name in weights:
                raise ValueError(f"{folder} holds {name} twice, the second time in {file}")
            weights[name] = weight
    if lost := sorted(listed.keys() - weights.keys()):
        raise ValueError(f"{folder} lacks the tensor {lost[0]}, which {INDEX} lists in {listed[lost[0]]}")
    return weights


def _can_pack(weight: mx.array, quantization: Quantization) -> bool:
    return weight.ndim == 2 and weight.shape[1] % quantization.group_size == 0


def _packed(name: str, weight: mx.array, quantization: Quantization | None) -> dict[str, mx.array]:
    """X.weight as X.weight, X.scales, X.biases when it is a matrix that can be quantized, else as it is."""
    if not quantization or not _can_pack(weight, quantization):
        return {name: weight}
    packed, scales, biases = mx.quantize(weight, quantization.group_size, quantization.bits)
    module = name.removesuffix(".weight")
    return {f"{module}.weight": packed, f"{module}.scales": scales, f"{module}.biases": biases}


def _new_config(config: dict, dtype: str | None, quantization: Quantization | None) -> dict:
    new = dict(config)
    if dtype:
        new.pop("torch_dtype", None)
        new["dtype"] = dtype
    if quantization:
        new["quantization"] = quantization._asdict() | {"mode": "affine"}
    return new


def _check_loads(folder: Path, source: Path) -> None:
    """Load the new folder as its user will: refuses unsupported kinds of drafts, tensors missing, unknown or misshapen."""
    from mlx_dflash.loading import load_draft

    try:
        load_draft(str(folder))
    except ValueError as error:
        raise ValueError(f"{source} cannot be used as a draft: {str(error).replace(str(folder), 'it')}") from error
