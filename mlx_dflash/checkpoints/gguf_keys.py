"""The keys that GGUF files of drafts and of targets share: a layer's modules, KV heads, RoPE scaling, quantization.

Works on a GGUFFile's metadata; prefix: its general.architecture and a dot. Source: the GGUF specification.
"""

from collections.abc import Mapping
from typing import Any

from ..files.gguf import GROUP_SIZE, GGUFFile

# Module of a layer, blk.N.X -> its name in Hugging Face's Llama and Qwen.
LAYER_MODULES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def num_kv_heads(gguf: GGUFFile, prefix: str) -> int:
    """Return the number of KV heads, that of all heads if none is given. Raises ValueError if layers differ."""
    found = gguf.value(f"{prefix}attention.head_count_kv", gguf.value(f"{prefix}attention.head_count"))
    if isinstance(found, list):
        raise ValueError(f"{gguf.path.name} has KV heads that differ by layer; expected one number for all")
    return found


def rope_scaling(gguf: GGUFFile, prefix: str) -> dict[str, Any] | None:
    """Return the scaling of RoPE as Hugging Face writes it, None without one."""
    kind = gguf.value(f"{prefix}rope.scaling.type", "none")
    if kind == "none":
        return None
    scaling = {"rope_type": kind, "factor": gguf.value(f"{prefix}rope.scaling.factor")}
    if f"{prefix}rope.scaling.original_context_length" in gguf.metadata:
        scaling["original_max_position_embeddings"] = gguf.value(f"{prefix}rope.scaling.original_context_length")
    return scaling


def quantization(bits: Mapping[str, int]) -> dict[str, Any]:
    """Return config.json's entry, if any: the commonest bits, and an entry of its own for each module that differs.

    bits: path of a module -> bits of its matrix.
    """
    if not bits:
        return {}
    counts = list(bits.values())
    default = max(sorted(set(counts)), key=counts.count)
    same = {"group_size": GROUP_SIZE, "mode": "affine"}
    return {"quantization": same | {"bits": default} | {n: same | {"bits": b} for n, b in bits.items() if b != default}}
