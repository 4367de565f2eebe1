"""Where a conversion writes: a folder that appears whole or not at all.

Knows files and folders, safetensors and their index; does not know what a model is.
"""

import json
import shutil
import uuid
from contextlib import contextmanager
from pathlib import Path
from typing import Iterator

import mlx.core as mx


@contextmanager
def new_folder(destination: str | Path) -> Iterator[Path]:
    """Give an empty folder next to `destination` that takes its name when the body ends without an error.

    Raises ValueError if the destination exists already or the body wrote nothing. On any error the folder is removed.
    Of two processes that finish at once, one gets the name and the other a FileExistsError.
    """
    destination = Path(destination)
    refuse_existing(destination)
    destination.parent.mkdir(parents=True, exist_ok=True)
    part = destination.parent / f".{destination.name}.{uuid.uuid4().hex[:12]}.part"
    part.mkdir()
    try:
        yield part
        if not any(part.iterdir()):
            raise ValueError(f"the conversion to {destination} wrote no file")
        _take_name(part, destination)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def refuse_existing(destination: str | Path) -> None:
    """Raise ValueError if there is anything under that name."""
    if Path(destination).exists():
        raise ValueError(f"{destination} exists already; remove it or choose another --mlx-path")


def write_weights(folder: Path, weights: dict[str, mx.array]) -> None:
    """Write safetensors and model.safetensors.index.json, named and sharded as mlx-lm does it.

    Raises ValueError for no weights, or when a file is shorter than its tensors (a full disk).
    """
    from mlx_lm.utils import make_shards

    if not weights:
        raise ValueError("no tensor to write: the source holds no weights")
    shards = make_shards(weights)
    weight_map = {}
    for number, shard in enumerate(shards, 1):
        many = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        name = "model.safetensors" if len(shards) == 1 else many
        mx.save_safetensors(str(folder / name), shard, metadata={"format": "mlx"})
        num_bytes = sum(w.nbytes for w in shard.values())
        if (folder / name).stat().st_size < num_bytes:
            raise ValueError(f"{name} is shorter than its {num_bytes} bytes of tensors; is the disk full?")
        weight_map.update(dict.fromkeys(shard, name))
    total_size = sum(w.nbytes for w in weights.values())
    index = {"metadata": {"total_size": total_size}, "weight_map": dict(sorted(weight_map.items()))}
    write_json(folder / "model.safetensors.index.json", index)


def cast(name: str, weight: mx.array, dtype: str) -> mx.array:
    """Give a floating array in `dtype`, other arrays as they are; ValueError if a finite value would overflow."""
    if not mx.issubdtype(weight.dtype, mx.floating) or weight.dtype == getattr(mx, dtype):
        return weight
    new = weight.astype(getattr(mx, dtype))
    if not mx.all(mx.isfinite(new) == mx.isfinite(weight)).item():
        raise ValueError(f"{name} has values beyond the range of {dtype}; choose --dtype float32")
    return new


def write_json(path: Path, content: dict) -> None:
    """Write a dict as indented JSON."""
    path.write_text(json.dumps(content, indent=4, ensure_ascii=False) + "\n", encoding="utf-8")


def write_config(folder: Path, config: dict) -> None:
    """Write config.json, sorted; a quantization is entered under both of its names, as mlx-lm does."""
    if "quantization" in config:
        config = {**config, "quantization_config": config["quantization"]}
    write_json(folder / "config.json", dict(sorted(config.items())))


def _take_name(part: Path, destination: Path) -> None:
    # A rename onto an empty folder would succeed, and one onto a full one fail with an error that names neither.
    if destination.exists():
        raise FileExistsError(f"{destination} was made by another process meanwhile")
    try:
        part.rename(destination)
    except OSError as error:
        if destination.exists():
            raise FileExistsError(f"{destination} was made by another process meanwhile") from error
        raise
