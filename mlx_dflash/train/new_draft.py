"""The shape of a new draft, and the source of its first weights.

A draft layer is a target layer that reads its context from elsewhere, so it starts as one of the target's last layers
where the shapes allow it. Knows the target's structure and the draft's configuration; knows nothing of training.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ..draft.model import DraftLayer, DraftModel
from ..models.structure import Structure

_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
_MLP = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class Size:
    """layers: of the draft. taps: of the target. block_size: anchor and drafts."""

    layers: int
    taps: int
    block_size: int


SIZES = {"tiny": Size(1, 3, 6), "small": Size(3, 5, 8), "base": Size(5, 5, 16), "large": Size(8, 6, 16)}


def tap_layers(num_target_layers: int, taps: int) -> list[int]:
    """Return evenly spaced target layers, from the second to the third from the end, as public drafts have them."""
    if taps > num_target_layers:
        raise ValueError(
            f"a target of {num_target_layers} layers cannot be tapped {taps} times; choose a smaller --size"
        )
    last = max(num_target_layers - 3, taps)
    if last >= num_target_layers or taps == 1:
        return list(range(num_target_layers - taps, num_target_layers))
    return [round(1 + i * (last - 1) / (taps - 1)) for i in range(taps)]


def draft_config(structure: Structure, args: Any, size: Size, mask_token_id: int) -> dict[str, Any]:
    """Return config.json, in z-lab's layout, of a draft for a target. args: the target's own configuration."""
    width = structure.embed(mx.array([[0]])).shape[-1]

    text = _get(args, "text_config")
    places = (args, text, _get(text, "rope_parameters"))

    def of_target(key: str, default: Any) -> Any:
        for place in places:
            value = _get(place, key)
            # A config may write a float as an integer.
            if isinstance(value, (int, type(default))) and not isinstance(value, bool) and value:
                return type(default)(value)
        return default

    head_dim = of_target("head_dim", 0) or width // of_target("num_attention_heads", max(1, width // 64))
    num_heads = of_target("num_attention_heads", max(1, width // head_dim))
    num_kv_heads = of_target("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads or head_dim % 2:
        head_dim, num_heads, num_kv_heads = 64, max(1, width // 64), 1
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "attention_bias": False,
        "block_size": size.block_size,
        "dflash_config": {
            "mask_token_id": mask_token_id,
            "target_layer_ids": tap_layers(len(structure.layers), size.taps),
        },
        "head_dim": head_dim,
        "hidden_act": "silu",
        "hidden_size": width,
        "intermediate_size": of_target("intermediate_size", 3 * width),
        "layer_types": ["full_attention"] * size.layers,
        "max_position_embeddings": of_target("max_position_embeddings", 32768),
        "num_attention_heads": num_heads,
        "num_hidden_layers": size.layers,
        "num_key_value_heads": num_kv_heads,
        "num_target_layers": len(structure.layers),
        "rms_norm_eps": 1e-6,
        "rope_scaling": None,
        "rope_theta": of_target("rope_theta", 10000.0),
        "tie_word_embeddings": True,
        "vocab_size": structure.vocab_size,
    }


def _get(place: Any, key: str) -> Any:
    return place.get(key) if isinstance(place, dict) else getattr(place, key, None)


def unused_token(counts: np.ndarray, tokenizer: Any) -> int:
    """Return a token to stand for the mask: a special one that no text holds, or else the rarest of all.

    counts: (V,), how often the text to learn has each token.
    """
    special = sorted(
        i for i in tokenizer.get_added_vocab().values() if i < len(counts) and i not in tokenizer.eos_token_ids
    )
    unused = [i for i in special if counts[i] == 0]
    return unused[-1] if unused else int(np.argmin(counts))


def initialize(draft: DraftModel, structure: Structure, seed: int = 0) -> list[int | None]:
    """Give a new draft its first weights. Returns, per draft layer, the target layer that it is a copy of, or None."""
    keys = iter(mx.random.split(mx.random.key(seed), 16 * len(draft.layers)))
    for layer in draft.layers:
        for module in (layer.self_attn, layer.mlp):
            for child in module.children().values():
                if isinstance(child, nn.Linear):
                    child.weight = mx.random.normal(child.weight.shape, scale=0.02, key=next(keys))
    # The mean of the taps is a fair summary before anything is learned.
    taps, width = len(draft.config.target_layer_ids), draft.config.target_hidden_size
    if draft.config.hidden_size == width:
        draft.fc.weight = mx.concatenate([mx.eye(width)] * taps, axis=1) / taps
    sources = _twins(draft, structure)
    for layer, number in zip(draft.layers, sources):
        if number is not None:
            _copy(layer, structure.layers[number])
    norms = [layer.input_layernorm.weight for layer, number in zip(draft.layers, sources) if number is not None]
    if norms:
        # Context rows meet the K and V projections through this norm only.
        draft.hidden_norm.weight = sum(norms) / len(norms)
    mx.eval(draft.parameters())
    return sources


def _twins(draft: DraftModel, structure: Structure) -> list[int | None]:
    """The last target layers that have the shapes of the draft's, in order."""
    fitting = [i for i, layer in enumerate(structure.layers) if _fits(draft.layers[0], layer)]
    chosen: list[int | None] = list(fitting[-len(draft.layers) :])
    return [None] * (len(draft.layers) - len(chosen)) + chosen


def _fits(layer: DraftLayer, other: Any) -> bool:
    """Whether a target's layer has every projection of a draft's layer, in its shape."""
    if not all(isinstance(getattr(other, name, None), nn.Module) for name in ("self_attn", "mlp")):
        return False
    return all(
        isinstance(child := getattr(getattr(other, part), name, None), nn.Module)
        and _matrix(child, check=getattr(layer, part)[name].weight.shape) is not None
        for part, names in (("self_attn", _ATTENTION), ("mlp", _MLP))
        for name in names
    )


def _matrix(linear: Any, check: Sequence[int] | None = None) -> mx.array | None:
    """The weight of a linear layer, unpacked; None if there is none, or not of the shape."""
    if isinstance(linear, nn.QuantizedLinear):
        packing = dict(group_size=linear.group_size, bits=linear.bits, mode=linear.mode)
        weight = mx.dequantize(linear.weight, linear.scales, linear.get("biases"), **packing)
    elif isinstance(linear, nn.Linear):
        weight = linear.weight
    else:
        return None
    return weight if check is None or tuple(weight.shape) == tuple(check) else None


def _copy(layer: DraftLayer, other: Any) -> None:
    for part, names in (("self_attn", _ATTENTION), ("mlp", _MLP)):
        for name in names:
            getattr(layer, part)[name].weight = _matrix(getattr(other, part)[name]).astype(mx.float32)
    for name in ("input_layernorm", "post_attention_layernorm"):
        if isinstance(norm := getattr(other, name, None), nn.RMSNorm):
            layer[name].weight = norm.weight.astype(mx.float32)
    for norm, projection in (("q_norm", "q_proj"), ("k_norm", "k_proj")):
        own, theirs = layer.self_attn[norm], getattr(other.self_attn, norm, None)
        if isinstance(theirs, nn.RMSNorm) and theirs.weight.shape == own.weight.shape:
            own.weight = theirs.weight.astype(mx.float32)
        else:
            # Without such a norm, the target's queries and keys have a length of their own; start with its mean.
            seen = layer.self_attn[projection].weight * layer.input_layernorm.weight
            own.weight = mx.full(own.weight.shape, math.sqrt((seen * seen).sum(axis=1).mean().item()))
