"""Targets and drafts written as the folders that people download."""

import json
from pathlib import Path

import mlx.core as mx
from mlx.utils import tree_flatten


def save_target(folder, model, config, tokenizer=None, shards=1):
    """Write a target as a Hugging Face folder that mlx_lm.load reads. Returns the folder as a Path."""
    folder = save_checkpoint(folder, config, dict(tree_flatten(model.parameters())), shards=shards)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    return folder


def save_draft(folder, config, weights, dtype=mx.float32, prefix="", shards=1):
    """Write a draft as a Hugging Face folder in z-lab's layout. prefix: put in front of every tensor name."""
    arrays = {prefix + name: mx.array(value).astype(dtype) for name, value in weights.items()}
    return save_checkpoint(folder, config, arrays, shards=shards)


def save_checkpoint(folder, config, arrays, shards=1):
    """config.json and model.safetensors, or `shards` numbered files with their index. Returns the Path."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    if shards == 1:
        mx.save_safetensors(str(folder / "model.safetensors"), arrays, metadata={"format": "pt"})
        return folder
    names, weight_map = sorted(arrays), {}
    for i in range(shards):
        file = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: arrays[name] for name in names[i::shards]}
        mx.save_safetensors(str(folder / file), part, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {"total_size": sum(a.nbytes for a in arrays.values())}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder
