"""Tiny Llama GGUF files for the tests, and their forward pass in numpy straight from the file's own tensors.

The writer and the dequantizer are those of the gguf package, independent of what is under test.
"""

from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type
from tokenizers import pre_tokenizers

LAYERS, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, MLP = 2, 64, 4, 2, 16, 96
EPS, THETA, CONTEXT = 1e-5, 5000.0, 512
TEMPLATE = "{% for m in messages %}<s>{{ m['role'] }}:{{ m['content'] }}</s>{% endfor %}"
MERGES = ["a b", "ab c", "Ġ a"]
TOKENS = ["<unk>", "<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet()), "ab", "abc", "Ġa", "<user>"]
MATRICES = {
    "attn_q": (HEADS * HEAD_DIM, HIDDEN),
    "attn_k": (KV_HEADS * HEAD_DIM, HIDDEN),
    "attn_v": (KV_HEADS * HEAD_DIM, HIDDEN),
    "attn_output": (HIDDEN, HEADS * HEAD_DIM),
    "ffn_gate": (MLP, HIDDEN),
    "ffn_up": (MLP, HIDDEN),
    "ffn_down": (HIDDEN, MLP),
}


def byte_level_tokens() -> dict:
    """Metadata of a byte-level BPE tokenizer, by the names of GGUFWriter's methods."""
    types = [2, 3, 3] + [1] * (len(TOKENS) - 4) + [4]
    return {
        "tokenizer_model": "gpt2",
        "tokenizer_pre": "smollm",
        "token_list": TOKENS,
        "token_types": types,
        "token_merges": MERGES,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unk_token_id": 0,
        "chat_template": TEMPLATE,
    }


def random_tensors(kind: Type, is_tied: bool = True, seed: int = 0) -> dict[str, tuple[np.ndarray, Type]]:
    """Name -> (raw data, type): matrices stored as `kind`, norms as F32."""
    rng = np.random.default_rng(seed)

    def matrix(shape: tuple[int, int]) -> tuple[np.ndarray, Type]:
        values = rng.normal(0, shape[1] ** -0.5, shape).astype(np.float32)
        return gguf.quants.quantize(values, kind), kind

    def norm() -> tuple[np.ndarray, Type]:
        # Multiples of 1/128, so that float16 and bfloat16 hold them.
        return (1 + rng.integers(-60, 60, HIDDEN) / 128).astype(np.float32), Type.F32

    tensors = {"token_embd.weight": matrix((len(TOKENS), HIDDEN)), "output_norm.weight": norm()}
    if not is_tied:
        tensors["output.weight"] = matrix((len(TOKENS), HIDDEN))
    for i in range(LAYERS):
        tensors |= {f"blk.{i}.{name}.weight": matrix(shape) for name, shape in MATRICES.items()}
        tensors |= {f"blk.{i}.{name}.weight": norm() for name in ("attn_norm", "ffn_norm")}
    return tensors


def write_gguf(path: Path, tensors: dict, tokenizer: dict | None = None, **metadata) -> Path:
    """Write a Llama file; `metadata` adds to or replaces what the methods of GGUFWriter are called with."""
    writer = gguf.GGUFWriter(path, metadata.pop("architecture", "llama"))
    values = {
        "context_length": CONTEXT,
        "embedding_length": HIDDEN,
        "feed_forward_length": MLP,
        "block_count": LAYERS,
        "head_count": HEADS,
        "head_count_kv": KV_HEADS,
        "layer_norm_rms_eps": EPS,
        "rope_freq_base": THETA,
        "rope_dimension_count": HEAD_DIM,
    }
    for name, value in (values | (tokenizer or byte_level_tokens()) | metadata).items():
        getattr(writer, f"add_{name}")(value)
    for name, (data, kind) in tensors.items():
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def dequantized(tensors: dict) -> dict[str, np.ndarray]:
    """Name -> float32 values by gguf's own dequantizer."""
    return {name: gguf.quants.dequantize(data, kind).astype(np.float32) for name, (data, kind) in tensors.items()}


def llama_logits(tensors: dict, tokens: list[int]) -> np.ndarray:
    """Logits (T, V) in float64: the Llama forward with interleaved RoPE, as GGUF orders the rows of q and k."""
    w = {name: value.astype(np.float64) for name, value in dequantized(tensors).items()}
    x = w["token_embd.weight"][tokens]  # (T, D)
    for i in range(LAYERS):
        layer = {name: w[f"blk.{i}.{name}.weight"] for name in [*MATRICES, "attn_norm", "ffn_norm"]}
        x = x + _attention(layer, _rms_norm(x, layer["attn_norm"]))
        h = _rms_norm(x, layer["ffn_norm"])
        gate = h @ layer["ffn_gate"].T
        x = x + (gate / (1 + np.exp(-gate)) * (h @ layer["ffn_up"].T)) @ layer["ffn_down"].T
    head = w.get("output.weight", w["token_embd.weight"])
    return _rms_norm(x, w["output_norm.weight"]) @ head.T


def _attention(layer: dict, h: np.ndarray) -> np.ndarray:
    num_tokens = len(h)
    q = _interleaved_rope((h @ layer["attn_q"].T).reshape(num_tokens, HEADS, HEAD_DIM))
    k = _interleaved_rope((h @ layer["attn_k"].T).reshape(num_tokens, KV_HEADS, HEAD_DIM))
    v = (h @ layer["attn_v"].T).reshape(num_tokens, KV_HEADS, HEAD_DIM)
    k, v = (np.repeat(x, HEADS // KV_HEADS, axis=1) for x in (k, v))  # (T, H, d)
    scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(HEAD_DIM)
    scores = np.where(np.tri(num_tokens, dtype=bool), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return np.einsum("hqk,khd->qhd", weights, v).reshape(num_tokens, -1) @ layer["attn_output"].T


def _interleaved_rope(x: np.ndarray) -> np.ndarray:
    angles = np.arange(len(x))[:, None, None] * THETA ** (-np.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    turned = (x[..., 0::2] + 1j * x[..., 1::2]) * np.exp(1j * angles)
    return np.stack([turned.real, turned.imag], -1).reshape(x.shape)


def _rms_norm(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + EPS) * weight
