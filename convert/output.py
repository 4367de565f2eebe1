"""The files that a conversion writes: safetensors with their index, and JSON. Does not know what a model is."""

import json
from pathlib import Path

import mlx.core as mx


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
