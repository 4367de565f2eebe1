"""GGUF targets of the common families: their tensors under mlx-lm's names and their metadata as config.json.

Works on a GGUFFile; knows neither tokenizer nor folders. Quantized words, scales and biases move, and are not computed
anew.
Source: the GGUF specification; for the row order of Llama's q and k, and for Gemma's norms, llama.cpp's
convert_hf_to_gguf.py.
"""

import re
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from mlx_dflash.checkpoints.gguf_keys import LAYER_MODULES, num_kv_heads, quantization, rope_scaling
from mlx_dflash.files.gguf import GGUFFile

TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_SANDWICH_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


class Family(NamedTuple):
    """The differences of a family from Llama.

    architectures: Hugging Face's class. names: layer names that are new or different. has_llama_rows: q and k rows in
    the order of interleaved RoPE. norm_offset: what llama.cpp adds to the norms.
    """

    model_type: str
    architectures: str
    names: dict[str, str] = {}
    has_llama_rows: bool = False
    norm_offset: float = 0.0


# general.architecture -> family. Mistral's models are "llama" there.
FAMILIES = {
    "llama": Family("llama", "LlamaForCausalLM", has_llama_rows=True),
    "mistral": Family("llama", "LlamaForCausalLM", has_llama_rows=True),
    "qwen2": Family("qwen2", "Qwen2ForCausalLM"),
    "qwen3": Family("qwen3", "Qwen3ForCausalLM"),
    "gemma3": Family("gemma3_text", "Gemma3ForCausalLM", _SANDWICH_NORMS, norm_offset=1.0),
    "phi3": Family("phi3", "Phi3ForCausalLM", {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}),
}
ROPE_FACTORS = "rope_freqs.weight"
LONG_ROPE_FACTORS = ("rope_factors_long.weight", "rope_factors_short.weight")


def family_of(gguf: GGUFFile) -> Family:
    """Give the file's family. Raises ValueError for an architecture that is not in the table."""
    architecture = gguf.value("general.architecture")
    if architecture not in FAMILIES:
        raise ValueError(f"{gguf.path.name} holds a {architecture!r} model; can convert {', '.join(FAMILIES)}")
    return FAMILIES[architecture]


def model_config(gguf: GGUFFile) -> dict:
    """Give config.json of the model, without dtype and token ids.

    Raises ValueError for another architecture and for what mlx-lm's model does not have (experts, partial RoPE).
    """
    family, prefix = family_of(gguf), gguf.value("general.architecture")
    if gguf.value(f"{prefix}.expert_count", 0):
        raise ValueError(f"{gguf.path.name} is a mixture of experts, which cannot be converted from GGUF")
    hidden_size, num_heads = gguf.value(f"{prefix}.embedding_length"), gguf.value(f"{prefix}.attention.head_count")
    head_dim = gguf.value(f"{prefix}.attention.key_length", hidden_size // num_heads)
    rotated = gguf.value(f"{prefix}.rope.dimension_count", head_dim)
    if rotated != head_dim and family.model_type != "phi3":
        raise ValueError(f"{gguf.path.name} rotates {rotated} of {head_dim} channels; can convert full RoPE only")
    bits = {mlx_name(name, family).removesuffix(".weight"): b for name, b in gguf.quantized_bits.items()}
    return (
        {
            "architectures": [family.architectures],
            "model_type": family.model_type,
            "hidden_act": "silu",
            "hidden_size": hidden_size,
            "intermediate_size": gguf.value(f"{prefix}.feed_forward_length"),
            "num_hidden_layers": gguf.value(f"{prefix}.block_count"),
            "num_attention_heads": num_heads,
            "num_key_value_heads": num_kv_heads(gguf, f"{prefix}."),
            "head_dim": head_dim,
            "rms_norm_eps": gguf.value(f"{prefix}.attention.layer_norm_rms_epsilon"),
            "vocab_size": gguf.entry("token_embd.weight").shape[0],
            "max_position_embeddings": gguf.value(f"{prefix}.context_length"),
            "rope_theta": gguf.value(f"{prefix}.rope.freq_base", 10000.0),
            "rope_scaling": _rope_scaling(gguf, prefix),
            "attention_bias": "blk.0.attn_q.bias" in gguf.directory,
            "mlp_bias": "blk.0.ffn_up.bias" in gguf.directory,
            "tie_word_embeddings": "output.weight" not in gguf.directory,
        }
        | _more_config(gguf, family, prefix, head_dim)
        | quantization(bits)
    )


def _more_config(gguf: GGUFFile, family: Family, prefix: str, head_dim: int) -> dict:
    """Return the keys that one family has in addition to Llama's."""
    if family.model_type == "phi3":
        rotated = gguf.value(f"{prefix}.rope.dimension_count", head_dim)
        original = gguf.value(f"{prefix}.rope.scaling.original_context_length", gguf.value(f"{prefix}.context_length"))
        return {"partial_rotary_factor": rotated / head_dim, "original_max_position_embeddings": original}
    if family.model_type != "gemma3_text":
        return {}
    num_layers = gguf.value(f"{prefix}.block_count")
    # The largest Gemma 3 divides its queries by hidden size / heads, the others by the head size.
    scalar = (
        gguf.value(f"{prefix}.embedding_length") // gguf.value(f"{prefix}.attention.head_count")
        if num_layers == 62
        else head_dim
    )
    return {
        "hidden_act": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": scalar,
        "sliding_window": gguf.value(f"{prefix}.attention.sliding_window"),
        "sliding_window_pattern": 6,
        "rope_theta": gguf.value(f"{prefix}.rope.freq_base", 1e6),
        "rope_local_base_freq": 10000.0,
    }


def model_weights(gguf: GGUFFile, config: dict) -> dict[str, mx.array]:
    """Give every tensor under mlx-lm's name, q and k rows in the order of half-split RoPE.

    Raises ValueError for a tensor that has no place in the model.
    """
    family, weights = family_of(gguf), {}
    for name, tensor in gguf.tensors.items():
        if name in (ROPE_FACTORS, *LONG_ROPE_FACTORS):
            continue
        if name.endswith(".biases") and not mx.all(mx.isfinite(tensor)).item():
            raise ValueError(f"{name.removesuffix('.biases')} has scales too large for a float16 bias")
        new_name = mlx_name(name, family)
        if family.has_llama_rows and ".q_proj." in new_name:
            tensor = half_split_rows(tensor, config["num_attention_heads"])
        elif family.has_llama_rows and ".k_proj." in new_name:
            tensor = half_split_rows(tensor, config["num_key_value_heads"])
        elif family.norm_offset and "norm.weight" in new_name:
            tensor = tensor - family.norm_offset
        weights[new_name] = tensor
    return weights


def mlx_name(name: str, family: Family) -> str:
    """Translate a tensor's (or a module's) name: "blk.3.attn_q.scales" -> "model.layers.3.self_attn.q_proj.scales"."""
    module, _, kind = name.rpartition(".")
    if module in TOP_NAMES:
        return f"{TOP_NAMES[module]}.{kind}"
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)", module)
    names = LAYER_MODULES | family.names
    if not match or match[2] not in names:
        raise ValueError(f"{family.model_type} has no tensor {name!r}; nothing was converted")
    return f"model.layers.{match[1]}.{names[match[2]]}.{kind}"


def half_split_rows(tensor: mx.array, num_heads: int) -> mx.array:
    """Reorder rows from interleaved RoPE (pairs 2i, 2i+1) to half-split RoPE (pairs i, i + d/2).

    tensor: (H·d, ...) -> the same shape; whole rows move, so packed words stay as they are.
    """
    pairs = tensor.reshape(num_heads, -1, 2, *tensor.shape[1:])  # (H, d/2, 2, ...)
    return pairs.swapaxes(1, 2).reshape(tensor.shape)


def _rope_scaling(gguf: GGUFFile, prefix: str) -> dict | None:
    if ROPE_FACTORS in gguf.directory:
        return _llama3_scaling(gguf, prefix)
    if LONG_ROPE_FACTORS[0] in gguf.directory:
        long, short = (gguf.tensors[name].astype(mx.float32).tolist() for name in LONG_ROPE_FACTORS)
        return {"type": "longrope", "rope_type": "longrope", "long_factor": long, "short_factor": short}
    scaling = rope_scaling(gguf, f"{prefix}.")
    if scaling is None:
        return None
    kind = scaling["rope_type"]
    if kind not in ("linear", "yarn"):
        raise ValueError(
            f"{gguf.path.name} scales RoPE by {kind!r}; can convert none, linear, yarn and Llama 3's factors"
        )
    if kind == "yarn":
        gguf.value(f"{prefix}.rope.scaling.original_context_length")  # mlx-lm would take a default for it
    return {"type": kind, **scaling}


def _llama3_scaling(gguf: GGUFFile, prefix: str) -> dict:
    """Find the four numbers of Llama 3's RoPE scaling from the factors that the file stores, one per frequency.

    All public Llama 3 models share low 1, high 4 and 8192 positions; the largest stored value is the factor.
    """
    stored = np.array(gguf.tensors[ROPE_FACTORS].astype(mx.float32))  # (d/2,)
    factor, low, high, positions = float(stored.max()), 1.0, 4.0, 8192
    theta = gguf.value(f"{prefix}.rope.freq_base", 10000.0)
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
