"""Tiny targets: mlx-lm models of a few families with seeded weights, and the tokens that mlx-lm makes with them."""

import importlib
import json

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.generate import generate_step

VOCAB_SIZE = 97


_LLAMA = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-6,
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "rope_theta": 10000.0,
}


_TARGETS = {
    "qwen3": {**_LLAMA, "model_type": "qwen3"},
    "llama": {**_LLAMA, "model_type": "llama"},
    # Sliding layers around a full one, and a window that a short prompt already fills.
    "llama_sliding": {
        **_LLAMA,
        "model_type": "llama",
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    # Gated delta, gated delta, gated delta, attention.
    "qwen3_5": {
        **_LLAMA,
        "model_type": "qwen3_5",
        "hidden_size": 64,
        "head_dim": 16,
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
        "linear_conv_kernel_dim": 4,
        "full_attention_interval": 4,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.5,
        },
    },
    # Sliding, full, sliding, full.
    "gemma3_text": {
        **_LLAMA,
        "model_type": "gemma3_text",
        "query_pre_attn_scalar": 8,
        "sliding_window": 8,
        "sliding_window_pattern": 2,
    },
}


TARGET_FAMILIES = tuple(_TARGETS)


def target_config(family="qwen3", **changes):
    """The Hugging Face config of a tiny target, a fresh dict. changes: keys to replace; None removes a key.

    family: one of TARGET_FAMILIES: qwen3 (4 layers, hidden 32, 4 heads, 2 KV heads, vocabulary 97), llama,
    llama_sliding (window 8, sliding and full in turn), qwen3_5 (3 gated-delta layers and one attention
    layer, hidden 64) and gemma3_text (window 8, sliding and full in turn).
    """
    return _changed(_TARGETS[family], changes)


def build_target(config, seed=0, dtype=mx.float32, scale=0.3):
    """An mlx-lm model of this config with seeded normal weights, evaluated, in eval mode."""
    module = importlib.import_module(f"mlx_lm.models.{config['model_type']}")
    # A copy: some mlx-lm configs rewrite the dicts they are given.
    args = module.ModelArgs.from_dict(json.loads(json.dumps(config)))
    model = module.Model(args)
    rng = np.random.RandomState(seed)
    weights = {}
    for name, value in sorted(tree_flatten(model.parameters())):
        noise = rng.standard_normal(value.shape)
        if name.endswith("A_log"):
            array = np.log(1 + np.abs(noise))
        elif value.ndim > 1:
            array = scale * noise
        else:  # Norms stay near what they start as, one or (Gemma's centred ones) zero.
            array = float(value.reshape(-1)[0]) + 0.1 * noise
        weights[name] = mx.array(array.astype(np.float32)).astype(dtype)
    model.update(tree_unflatten(list(weights.items())))
    model.eval()
    mx.eval(model.parameters())
    return model


def tiny_target(family="qwen3", seed=0, dtype=mx.float32, **changes):
    """build_target(target_config(family, **changes)): the common case in one call."""
    return build_target(target_config(family, **changes), seed=seed, dtype=dtype)


def context_free_target(probabilities, seed=0):
    """A qwen3 whose next-token distribution is `probabilities` (V,), all positive, at every position.

    All embedding rows are equal and no layer adds anything, so the normed hidden state h is constant,
    and head row v is log p(v) * h / (h . h). The class is mlx-lm's own.
    """
    log_p = np.log(np.asarray(probabilities, dtype=np.float64))
    model = tiny_target(seed=seed, vocab_size=len(log_p))
    table = model.model.embed_tokens.weight
    model.model.embed_tokens.weight = mx.broadcast_to(table[:1], table.shape)
    for layer in model.layers:
        for linear in (layer.self_attn.o_proj, layer.mlp.down_proj):
            linear.weight = mx.zeros_like(linear.weight)
    h = np.array(model.model.norm(table[0]), dtype=np.float64)
    model.lm_head.weight = mx.array(np.outer(log_p, h / (h @ h)).astype(np.float32))
    mx.eval(model.parameters())
    return model


def tied_rows_target(prompt, seed=0, num_tokens=64):
    """A bfloat16 qwen3 with two identical head rows: returns (model, lower id, higher id).

    The lower id is one that plain greedy decoding of `prompt` really emits, so exact ties for the first
    place occur, and the lower id must win every one of them.
    """
    model = tiny_target(seed=seed, dtype=mx.bfloat16)
    emitted = [t for t in plain_tokens(model, prompt, num_tokens) if t < VOCAB_SIZE - 2]
    lower = max(set(emitted), key=emitted.count)
    rows = mx.arange(VOCAB_SIZE)
    model.lm_head.weight = model.lm_head.weight[mx.where(rows == lower + 1, lower, rows)]
    mx.eval(model.parameters())
    return model, lower, lower + 1


def target_weights(model):
    """The parameters of an mlx-lm model as name -> float32 numpy array (Hugging Face names)."""
    return {n: np.array(v.astype(mx.float32)) for n, v in tree_flatten(model.parameters())}


def plain_tokens(model, prompt, n, sampler=None, seed=None, **kwargs):
    """The n tokens that mlx_lm.generate_step emits behind `prompt` (a list of ids). Seeds mx.random if told to."""
    if seed is not None:
        mx.random.seed(seed)
    steps = generate_step(mx.array(prompt), model, max_tokens=n, sampler=sampler, **kwargs)
    return [int(token) for token, _ in steps]


def _changed(base, changes):
    """A deep copy of base with keys replaced; a key whose new value is None is removed."""
    merged = {**json.loads(json.dumps(base)), **changes}
    return {key: value for key, value in merged.items() if value is not None}
