"""The files of a checkpoint: config.json, safetensors with or without an index, a learned mask embedding.

Reads, checks and writes files; knows what makes a folder a draft and nothing else of models.
"""

import json
import re
from math import prod
from pathlib import Path
from typing import Any

import mlx.core as mx

from .json_text import parse_json, read_json, told
from .torch_pickle import read_torch_file

INDEX = "model.safetensors.index.json"
MASK_FILE = "mask_embedding.pt"
_SHARD = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.safetensors")
_ITEM_BYTES = {"F32": 4, "F16": 2, "BF16": 2, "I8": 1, "I16": 2, "I32": 4, "I64": 8}
_ITEM_BYTES |= {"U8": 1, "U16": 2, "U32": 4, "U64": 8, "BOOL": 1, "C64": 8, "F8_E4M3": 1, "F8_E8M0": 1}
_MAX_DIMENSION = 2**31 - 1  # MLX counts in 32 bits
_RELATIVES = ("dflash", "dspark", "domino", "dfly")


def read_config(folder: Path) -> dict[str, Any]:
    """Read config.json. Raises FileNotFoundError if there is none, ValueError unless it holds an object."""
    file = folder / "config.json"
    if not file.is_file():
        raise FileNotFoundError(f"{folder} has no config.json; expected a model folder")
    return read_json(file)


def is_draft_config(config: dict[str, Any]) -> bool:
    """Say whether config.json describes a draft, of DFlash or of a relative, which the draft loader refuses by name."""
    named = str(config.get("architectures") or "").lower()
    return any(word in named for word in _RELATIVES) or "dflash_config" in config or "speculators_model_type" in config


def read_tensors(folder: Path) -> dict[str, mx.array]:
    """Read all tensors of a folder's safetensors, lazily: those its index names, the one file, or one set of shards.

    Raises FileNotFoundError for files that are missing, ValueError that names the file or tensor for damaged or
    ambiguous ones.
    """
    mapping = None
    if (folder / INDEX).is_file():
        mapping = read_json(folder / INDEX).get("weight_map")
        if not isinstance(mapping, dict) or not mapping:
            raise ValueError(f"{folder / INDEX} has no weight_map, which says in which file each tensor is")
        if strange := [n for n in mapping.values() if not isinstance(n, str) or Path(n).name != n or len(n) > 255]:
            raise ValueError(f"{folder / INDEX} names the file {told(strange[0])}; expected files of the same folder")
    files = sorted({folder / name for name in mapping.values()} if mapping else folder.glob("*.safetensors"))
    absent = [f.name for f in files if not f.is_file()]
    if absent or not files:
        raise FileNotFoundError(f"{folder} lacks {', '.join(absent[:5]) or 'safetensors files'}")
    if mapping is None and len(files) > 1:
        _check_shards(files)
    tensors: dict[str, mx.array] = {}
    for file in files:
        found = read_safetensors(file)
        if mapping is not None:
            found = {name: tensor for name, tensor in found.items() if mapping.get(name) == file.name}
        if twice := sorted(tensors.keys() & found.keys()):
            raise ValueError(f"{folder} holds {twice[0]} twice, the second time in {file.name}")
        tensors |= found
    if lost := sorted(set(mapping or ()) - tensors.keys()):
        first = told(", ".join(lost[:5]))[1:-1]
        raise ValueError(f"{folder / INDEX} promises tensors that its files do not hold: {first}")
    return tensors


def read_safetensors(file: Path) -> dict[str, mx.array]:
    """Read one file, lazily. Raises ValueError that names it, and the tensor, for what check_safetensors refuses."""
    check_safetensors(file)
    try:
        return mx.load(str(file), format="safetensors")
    except RuntimeError as error:
        raise ValueError(f"{file} is not a readable safetensors file: {error}") from error


def check_safetensors(file: Path) -> None:
    """Raise ValueError unless the tensors, each named once, fill the file: no gap, no overlap, nothing after the last.

    Source: the safetensors format, https://github.com/huggingface/safetensors.
    """
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little") if size >= 10 else 0
        if not 2 <= length <= size - 8:
            raise ValueError(f"{file} is not a safetensors file, or is cut off: {size} bytes with a header of {length}")
        text = stream.read(length)
    try:
        header = parse_json(text, is_unique=True)
        if not isinstance(header, dict):
            raise ValueError(f"expected an object, got {type(header).__name__}")
        texts = header.pop("__metadata__", None) or {}
        if not isinstance(texts, dict) or not all(isinstance(text, str) for text in texts.values()):
            raise ValueError("__metadata__ must be text by name")
    except ValueError as error:
        raise ValueError(f"{file} is not a safetensors file: its header cannot be read ({error})") from error
    places = sorted((*_place(file, name, entry), told(name)[1:-1]) for name, entry in header.items())
    reached = 0
    for start, end, name in places:
        if start != reached:
            how = "overlaps the one before it" if start < reached else "has unused bytes before it"
            raise ValueError(f"{file}: {name} {how}: it starts at byte {start} of the data, expected {reached}")
        reached = end
    if reached + 8 + length != size:
        raise ValueError(f"{file} has {size} bytes, its header says {reached + 8 + length}; download it again")


def _place(file: Path, name: str, entry: Any) -> tuple[int, int]:
    """Where the data of a tensor start and end. Raises ValueError if its size is not what type and shape need."""
    name = told(name)[1:-1]
    kind, shape, offsets = (
        map(entry.get, ("dtype", "shape", "data_offsets")) if isinstance(entry, dict) else (None,) * 3
    )
    if not isinstance(kind, str) or kind not in _ITEM_BYTES:
        raise ValueError(f"{file}: {name} has the type {told(kind)}; expected one of {', '.join(_ITEM_BYTES)}")
    if not _are_counts(shape) or max(shape, default=0) > _MAX_DIMENSION:
        raise ValueError(f"{file}: {name} has the shape {told(shape)}; expected counts up to {_MAX_DIMENSION}")
    if not _are_counts(offsets) or len(offsets) != 2:
        raise ValueError(f"{file}: {name} has the data_offsets {told(offsets)}; expected its first byte and its end")
    needed = prod(shape) * _ITEM_BYTES[kind]
    if offsets[1] - offsets[0] != needed:
        raise ValueError(f"{file}: {name} has {offsets[1] - offsets[0]} bytes; {kind} of shape {shape} needs {needed}")
    return tuple(offsets)


def _are_counts(value: Any) -> bool:
    return isinstance(value, list) and all(type(n) is int and n >= 0 for n in value)


def _check_shards(files: list[Path]) -> None:
    parts = [_SHARD.fullmatch(f.name) for f in files]
    names = {(m[1], int(m[3])) for m in parts if m}
    if None in parts or len(names) != 1:
        raise ValueError(
            f"cannot tell which of {', '.join(f.name for f in files)} to load; expected one file, or an index"
        )
    total = names.pop()[1]
    missing = sorted(set(range(1, total + 1)) - {int(m[2]) for m in parts})
    if missing:
        raise FileNotFoundError(f"{files[0].parent} lacks shards {missing} of {total}")


def read_mask_embedding(folder: Path) -> tuple[mx.array | None, int | None]:
    """Read mask_embedding.pt, without executing it: the vector (H,) and the mask token's id, each None if not there.

    Raises ValueError for anything but one vector, bare or in a dict as "embedding" or "mask_embedding".
    """
    file = folder / MASK_FILE
    if not file.is_file():
        return None, None
    held, token = read_torch_file(file), None
    if isinstance(held, dict):
        token = held.get("mask_token_id")
        held = held.get("embedding", held.get("mask_embedding"))
    token = token.item() if isinstance(token, mx.array) and token.size == 1 else token
    if not isinstance(held, mx.array) or held.ndim not in (1, 2) or held.size != held.shape[-1]:
        raise ValueError(f"{file} must hold one vector, bare or in a dict as 'embedding' or 'mask_embedding'")
    if token is not None and not isinstance(token, int):
        raise ValueError(f"{file} has a mask_token_id of type {type(token).__name__}; expected a number")
    return held.reshape(-1), token


def find_token(folder: Path, token: str) -> int | None:
    """Find a token's id in the folder's tokenizer files; None if they do not have it."""
    if (file := folder / "added_tokens.json").is_file() and isinstance(found := read_json(file).get(token), int):
        return found
    if (file := folder / "tokenizer.json").is_file():
        content = read_json(file)
        added = {t.get("content"): t.get("id") for t in content.get("added_tokens") or []}
        vocabulary = (content.get("model") or {}).get("vocab")
        return added.get(token, vocabulary.get(token) if isinstance(vocabulary, dict) else None)
    return None


def write_tensors(folder: Path, tensors: dict[str, mx.array]) -> None:
    """Write safetensors and their index, named and sharded as mlx-lm does it.

    Raises ValueError if there are no tensors, OSError if the disk does not take them.
    """
    from mlx_lm.utils import make_shards

    if not tensors:
        raise ValueError("no tensor to write: the source holds no weights")
    shards = make_shards(tensors)
    weight_map = {}
    for number, shard in enumerate(shards, 1):
        many = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        name = "model.safetensors" if len(shards) == 1 else many
        write_safetensors(folder / name, shard)
        weight_map.update(dict.fromkeys(shard, name))
    total_size = sum(tensor.nbytes for tensor in tensors.values())
    write_json(folder / INDEX, {"metadata": {"total_size": total_size}, "weight_map": dict(sorted(weight_map.items()))})


def write_safetensors(file: Path, tensors: dict[str, mx.array]) -> None:
    """Write one file. Raises OSError that names it if it cannot be written, or is shorter than its tensors."""
    mx.eval(tensors)
    try:
        mx.save_safetensors(str(file), tensors, metadata={"format": "mlx"})
    except RuntimeError as error:
        raise OSError(f"{file} cannot be written, is the disk full? {error}") from error
    num_bytes = sum(tensor.nbytes for tensor in tensors.values())
    if file.stat().st_size < num_bytes:
        raise OSError(f"{file} is shorter than its {num_bytes} bytes of tensors; is the disk full?")


def write_config(folder: Path, config: dict[str, Any]) -> None:
    """Write config.json, sorted; a quantization is entered under both of its names, as mlx-lm does."""
    if "quantization" in config:
        config = {**config, "quantization_config": config["quantization"]}
    write_json(folder / "config.json", dict(sorted(config.items())))


def write_json(file: Path, content: dict[str, Any]) -> None:
    """Write a dict as indented JSON."""
    file.write_text(json.dumps(content, indent=4, ensure_ascii=False) + "\n", encoding="utf-8")


def cast(name: str, tensor: mx.array, dtype: str) -> mx.array:
    """Return a floating array in `dtype`, other arrays as they are. Raises ValueError if a finite value would overflow.

    dtype: "float16", "bfloat16" or "float32". name: for the message.
    """
    if not mx.issubdtype(tensor.dtype, mx.floating) or tensor.dtype == getattr(mx, dtype):
        return tensor
    new = tensor.astype(getattr(mx, dtype))
    if not mx.all(mx.isfinite(new) == mx.isfinite(tensor)).item():
        raise ValueError(f"{name} has values beyond the range of {dtype}; choose float32")
    return new
