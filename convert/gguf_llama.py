"""The Llama family in GGUF: its tensors under mlx-lm's names and its metadata as config.json.

Works on a GGUFFile; knows neither tokenizer nor folders. Quantized words, scales and biases are moved, never recomputed.
Source: the GGUF specification; row order of q and k: llama.cpp's convert_hf_to_gguf.py (LlamaModel.permute).
"""

import re

import mlx.core as mx
import numpy as np

from mlx_dflash.gguf_file import GROUP_SIZE, GGUFFile

ARCHITECTURE = "llama"
TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
ROPE_FACTORS = "rope_freqs.weight"


def llama_config(gguf: GGUFFile) -> dict:
    """Give config.json of the model, without dtype and token ids.

    Raises ValueError for another architecture and for what mlx-lm's llama does not have (experts, partial RoPE).
    """
    architecture = gguf.value("general.architecture")
    if architecture != ARCHITECTURE:
        raise ValueError(f"{gguf.path.name} holds a {architecture!r} model; can convert {ARCHITECTURE!r}")
    if gguf.value("llama.expert_count", 0):
        raise ValueError(f"{gguf.path.name} is a mixture of experts, which cannot be converted from GGUF")
    hidden_size, num_heads = gguf.value("llama.embedding_length"), gguf.value("llama.attention.head_count")
    head_dim = gguf.value("llama.attention.key_length", hidden_size // num_heads)
    rotated = gguf.value("llama.rope.dimension_count", head_dim)
    if rotated != head_dim:
        raise ValueError(f"{gguf.path.name} rotates {rotated} of {head_dim} channels; can convert full RoPE only")
    num_kv_heads = gguf.value("llama.attention.head_count_kv", num_heads)
    if isinstance(num_kv_heads, list):
        raise ValueError(f"{gguf.path.name} has KV heads that differ by layer; can convert one number for all")
    quantization = _quantization(gguf)
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": hidden_size,
        "intermediate_size": gguf.value("llama.feed_forward_length"),
        "num_hidden_layers": gguf.value("llama.block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": head_dim,
        "rms_norm_eps": gguf.value("llama.attention.layer_norm_rms_epsilon"),
        "vocab_size": gguf.entry("token_embd.weight").shape[0],
        "max_position_embeddings": gguf.value("llama.context_length"),
        "rope_theta": gguf.value("llama.rope.freq_base", 10000.0),
        "rope_scaling": _rope_scaling(gguf),
        "attention_bias": "blk.0.attn_q.bias" in gguf.directory,
        "mlp_bias": "blk.0.ffn_up.bias" in gguf.directory,
        "tie_word_embeddings": "output.weight" not in gguf.directory,
    } | ({"quantization": quantization} if quantization else {})


def llama_weights(gguf: GGUFFile, config: dict) -> dict[str, mx.array]:
    """Give every tensor under mlx-lm's name, q and k rows in the order of half-split RoPE.

    Raises ValueError for a tensor that has no place in the model.
    """
    weights = {}
    for name, tensor in gguf.tensors.items():
        if name == ROPE_FACTORS:
            continue
        if name.endswith(".biases") and not mx.all(mx.isfinite(tensor)).item():
            raise ValueError(f"{name.removesuffix('.biases')} has scales too large for a float16 bias")
        new_name = mlx_name(name)
        if ".q_proj." in new_name:
            tensor = half_split_rows(tensor, config["num_attention_heads"])
        elif ".k_proj." in new_name:
            tensor = half_split_rows(tensor, config["num_key_value_heads"])
        weights[new_name] = tensor
    return weights


def mlx_name(name: str) -> str:
    """Translate a tensor's (or a module's) name: "blk.3.attn_q.scales" -> "model.layers.3.self_attn.q_proj.scales"."""
    module, _, kind = name.rpartition(".")
    if module in TOP_NAMES:
        return f"{TOP_NAMES[module]}.{kind}"
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)", module)
    if not match or match[2] not in LAYER_NAMES:
        raise ValueError(f"the Llama family has no tensor {name!r}; nothing was converted")
    return f"model.layers.{match[1]}.{LAYER_NAMES[match[2]]}.{kind}"


def half_split_rows(tensor: mx.array, num_heads: int) -> mx.array:
    """Reorder rows from interleaved RoPE (pairs 2i, 2i+1) to half-split RoPE (pairs i, i + d/2).

    tensor: (H·d, ...) -> the same shape; whole rows move, so packed words stay as they are.
    """
    pairs = tensor.reshape(num_heads, -1, 2, *tensor.shape[1:])  # (H, d/2, 2, ...)
    return pairs.swapaxes(1, 2).reshape(tensor.shape)


def _quantization(gguf: GGUFFile) -> dict | None:
    """The quantization entry: the commonest bits for all, an entry of its own for every matrix that differs."""
    bits = gguf.quantized_bits
    if not bits:
        return None
    counts = list(bits.values())
    default = max(sorted(set(counts)), key=counts.count)
    differing = {
        mlx_name(name).removesuffix(".weight"): {"group_size": GROUP_SIZE, "bits": b, "mode": "affine"}
        for name, b in bits.items()
        if b != default
    }
    return {"group_size": GROUP_SIZE, "bits": default, "mode": "affine"} | differing


def _rope_scaling(gguf: GGUFFile) -> dict | None:
    kind = gguf.value("llama.rope.scaling.type", "none")
    if ROPE_FACTORS in gguf.directory:
        return _llama3_scaling(gguf)
    if kind == "none":
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": gguf.value("llama.rope.scaling.factor")}
    raise ValueError(f"{gguf.path.name} scales RoPE by {kind!r}; can convert none, linear and Llama 3's factors")


def _llama3_scaling(gguf: GGUFFile) -> dict:
    """Find the four numbers of Llama 3's RoPE scaling from the factors that the file stores, one per frequency.

    All public Llama 3 models share low 1, high 4 and 8192 positions; the largest stored value is the factor.
    """
    stored = np.array(gguf.tensors[ROPE_FACTORS].astype(mx.float32))  # (d/2,)
    factor, low, high, positions = float(stored.max()), 1.0, 4.0, 8192
    theta = gguf.value("llama.rope.freq_base", 10000.0)
    wavelengths = 2 * np.pi * theta ** (np.arange(stored.size) / stored.size)
    smooth = np.clip((positions / wavelengths - low) / (high - low), 0, 1)
    expected = 1 / ((1 - smooth) / factor + smooth)
    if not np.allclose(stored, expected, rtol=1e-3):
        raise ValueError(f"{gguf.path.name}: {ROPE_FACTORS} is not Llama 3's RoPE scaling with factor {factor}")
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": positions,
    }
