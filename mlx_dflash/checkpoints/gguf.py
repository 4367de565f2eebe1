"""DFlash drafts in GGUF files: the metadata as a config.json in z-lab's layout, the tensors as they are named there.

Works on a GGUFFile. Tensor names are translated elsewhere, with all others.
Source: llama.cpp's "dflash" architecture.
"""

from typing import Any

import mlx.core as mx

from ..draft.config import FULL, MAX_LAYERS, SLIDING
from ..files.gguf import GROUP_SIZE, GGUFFile
from .gguf_keys import num_kv_heads, quantization, rope_scaling
from .names import plain_name

ARCHITECTURES = ("dflash", "dflash-draft")
_SIZES = {
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "block_count": "num_hidden_layers",
    "attention.head_count": "num_attention_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "context_length": "max_position_embeddings",
    "rope.freq_base": "rope_theta",
    "block_size": "block_size",
    "attention.sliding_window": "sliding_window",
    "attention.causal": "is_causal",
    "logit_scale": "logit_scale",
    "final_logit_softcapping": "final_logit_softcapping",
    "conv_kernel_size": "conv_kernel_size",
    "conv_group_size": "conv_group_size",
    "selector_rank": "selector_rank",
    "selector_top_k": "selector_top_k",
    "embedding_scale": "input_embedding_scale",
    "sample_from_anchor": "sample_from_anchor",
}


def is_gguf_draft(gguf: GGUFFile) -> bool:
    """Say whether the file holds a DFlash draft."""
    return gguf.value("general.architecture") in ARCHITECTURES


def gguf_draft_config(gguf: GGUFFile) -> dict[str, Any]:
    """Give the draft's config.json in z-lab's layout. Raises ValueError that names a key the file lacks."""
    prefix = gguf.value("general.architecture") + "."
    config = {new: gguf.metadata[prefix + key] for key, new in _SIZES.items() if prefix + key in gguf.metadata}
    taps = gguf.value(prefix + "target_layers")
    if not isinstance(taps, list) or not all(isinstance(i, int) and i >= 1 for i in taps):
        raise ValueError(
            f"{gguf.path.name} has {prefix}target_layers = {taps}; expected numbers from 1 on, where layer l is l + 1"
        )
    config["num_key_value_heads"] = num_kv_heads(gguf, prefix)
    config["dflash_config"] = {
        "target_layer_ids": [i - 1 for i in taps],
        "mask_token_id": gguf.value("tokenizer.ggml.mask_token_id"),
    }
    is_v2 = "selector_rank" in config
    config |= {"architectures": ["DFlash2DraftModel" if is_v2 else "DFlashDraftModel"], "model_type": "qwen3"}
    config["vocab_size"] = _vocab_size(gguf, prefix)
    if "d2t" in gguf.directory:
        config["draft_vocab_size"] = gguf.entry("d2t").shape[0]
    config |= {
        "has_embed_tokens": "token_embd.weight" in gguf.directory,
        "has_lm_head": "output.weight" in gguf.directory,
    }
    width = gguf.entry("fc.weight").shape[-1]
    if not taps or width % len(taps):
        raise ValueError(
            f"{gguf.path.name}: fc reads {width} features, which do not divide among {len(taps)} target layers"
        )
    config["target_hidden_size"] = width // len(taps)
    config |= {
        "layer_types": _layer_types(gguf, prefix, gguf.value(prefix + "block_count", kind=int)),
        "rope_scaling": rope_scaling(gguf, prefix),
    }
    bits = {plain_name(n).removesuffix(".weight"): b for n, b in gguf.quantized_bits.items() if _stays_quantized(n)}
    return config | quantization(bits)


def gguf_draft_tensors(gguf: GGUFFile) -> dict[str, mx.array]:
    """Give the tensors; quantized ones that are no matrix of a linear layer are dequantized."""
    tensors = dict(gguf.tensors)
    for name, bits in gguf.quantized_bits.items():
        if not _stays_quantized(name):
            stem = name.removesuffix("weight")
            scales, biases = tensors.pop(stem + "scales"), tensors.pop(stem + "biases")
            scales, biases = scales.astype(mx.float32), biases.astype(mx.float32)
            tensors[name] = mx.dequantize(tensors[name], scales, biases, group_size=GROUP_SIZE, bits=bits)
    return tensors


def _stays_quantized(name: str) -> bool:
    return (plain_name(name) or "").endswith(".weight")


def _vocab_size(gguf: GGUFFile, prefix: str) -> int:
    for name in ("selector_predecessor.weight", "selector_predecessor", "token_embd.weight"):
        if name in gguf.directory:
            return gguf.directory[name].shape[0]
    if "output.weight" in gguf.directory and "d2t" not in gguf.directory:
        return gguf.directory["output.weight"].shape[0]
    if prefix + "vocab_size" in gguf.metadata:
        return gguf.metadata[prefix + "vocab_size"]
    return len(gguf.value("tokenizer.ggml.tokens", kind=list))


def _layer_types(gguf: GGUFFile, prefix: str, num_layers: int) -> list[str]:
    """From the sliding window and its pattern: per layer, or one full layer in every n, or all sliding."""
    if not 0 < num_layers <= MAX_LAYERS:
        raise ValueError(f"{gguf.path.name} has {num_layers} layers; can load 1 to {MAX_LAYERS}")
    if not gguf.value(prefix + "attention.sliding_window", 0):
        return [FULL] * num_layers
    pattern = gguf.value(prefix + "attention.sliding_window_pattern", 0, kind=int | list)
    if isinstance(pattern, list):
        if len(pattern) != num_layers:
            raise ValueError(
                f"{gguf.path.name} has a sliding_window_pattern of {len(pattern)} entries for {num_layers} layers"
            )
        return [SLIDING if slides else FULL for slides in pattern]
    return [FULL if pattern and (i + 1) % pattern == 0 else SLIDING for i in range(num_layers)]
