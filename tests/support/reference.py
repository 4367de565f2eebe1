"""The draft and the target in plain numpy, float64 inside: slow, short, and written from the description.

It shares nothing with the product, so that a mistake must be made twice to go unseen. It knows DFlash 1
checkpoints (config.json as published, weights by z-lab's tensor names) and Llama/Qwen3 targets (Hugging
Face names). It knows no caches, no batches, no mlx: every call computes everything again.
Letters: P context rows, L block rows, γ = L - 1 drafts, H heads, d head size, D hidden, T taps, V vocabulary.
"""

import math

import numpy as np


def reference_draft_logits(config, weights, features, anchor, embed, head, block_size=None, first_position=0):
    """The draft's logits for every masked slot of one block.

    config: a DFlash 1 config.json as a dict. weights: z-lab tensor name -> array.
    features: (P, T*D), the context features of positions first_position .. first_position + P - 1.
    anchor: token id. embed, head: (V, D), the target's embedding table and output head.
    block_size: rows of the block, the anchor included; the checkpoint's own when None.
    Returns (γ, V) float64, row i for the token at i + 1 places behind the anchor.
    """
    block_size = block_size or _option(config, "block_size", 16)
    mask_row = weights.get("mask_embedding")
    if mask_row is None:
        mask_row = embed[_option(config, "mask_token_id")]
    rows = [embed[anchor]] + [np.reshape(mask_row, -1)] * (block_size - 1)
    block = np.array(rows, dtype=np.float64)  # (L, D)
    hidden = reference_draft_hidden(config, weights, features, block, first_position)
    logits = hidden[1:] @ np.asarray(head, dtype=np.float64).T  # (γ, V)
    softcap = _option(config, "final_logit_softcapping")
    return np.tanh(logits / softcap) * softcap if softcap else logits


def reference_draft_hidden(config, weights, features, block, first_position=0):
    """The draft's hidden states after its final norm, (L, D), for the embedded block (L, D).

    features: (P, T*D) as in reference_draft_logits; the block stands right behind them.
    """
    w = _float64(weights)
    context = reference_context_kv(config, weights, features, first_position)
    num_context = len(features)
    positions = first_position + num_context + np.arange(len(block))  # (L,)
    context_positions = first_position + np.arange(num_context)  # (P,)
    hidden = np.asarray(block, dtype=np.float64)
    for i, (context_k, context_v) in enumerate(context):
        name, eps = f"layers.{i}.", config["rms_norm_eps"]
        x = rms_norm(hidden, w[name + "input_layernorm.weight"], eps)
        q = _heads(config, w, name + "self_attn.q_proj", x)
        q = rms_norm(q, w[name + "self_attn.q_norm.weight"], eps)
        q = rotate(q, positions, *rope_frequencies(config))  # (H, L, d)
        k, v = _keys_values(config, w, name + "self_attn.", x, positions)  # (Hkv, L, d)
        visible = np.concatenate(
            [
                _context_visible(config, i, positions, context_positions),
                _block_visible(config, i, positions),
            ],
            axis=1,
        )  # (L, P + L)
        out = attend(q, np.concatenate([context_k, k], 1), np.concatenate([context_v, v], 1), visible)
        hidden = hidden + _linear(w, name + "self_attn.o_proj", out)
        hidden = hidden + _mlp(w, name + "mlp.", rms_norm(hidden, w[name + "post_attention_layernorm.weight"], eps))
    return rms_norm(hidden, w["norm.weight"], config["rms_norm_eps"])


def reference_context_kv(config, weights, features, first_position=0):
    """Every draft layer's context K and V from the features (P, T*D): a list of (K, V), each (Hkv, P, d).

    The features pass fc and hidden_norm once for all layers, and no layer's input_layernorm. K is
    normed and rotated at its absolute position; V is neither.
    """
    w = _float64(weights)
    fused = _linear(w, "fc", np.asarray(features, dtype=np.float64))  # (P, D)
    fused = rms_norm(fused, w["hidden_norm.weight"], config["rms_norm_eps"])
    positions = first_position + np.arange(len(fused))
    return [
        _keys_values(config, w, f"layers.{i}.self_attn.", fused, positions) for i in range(config["num_hidden_layers"])
    ]


def reference_target(config, weights, tokens):
    """A Llama or Qwen3 target over tokens (S,), without a cache.

    config: Hugging Face config.json as a dict; layer_types and sliding_window are honoured.
    weights: Hugging Face tensor name -> array; q_norm and k_norm are applied where they exist.
    Returns the logits (S, V) and a list with the residual stream (S, D) behind every layer, which is
    before the final norm also for the last layer.
    """
    w = _float64(weights)
    eps = config["rms_norm_eps"]
    positions = np.arange(len(tokens))
    hidden = w["model.embed_tokens.weight"][np.asarray(tokens)]  # (S, D)
    streams = []
    for i in range(config["num_hidden_layers"]):
        name = f"model.layers.{i}."
        x = rms_norm(hidden, w[name + "input_layernorm.weight"], eps)
        q = _heads(config, w, name + "self_attn.q_proj", x)
        if name + "self_attn.q_norm.weight" in w:
            q = rms_norm(q, w[name + "self_attn.q_norm.weight"], eps)
        q = rotate(q, positions, *rope_frequencies(config))
        k, v = _keys_values(config, w, name + "self_attn.", x, positions)
        visible = positions[None] <= positions[:, None]
        if _layer_type(config, i) == "sliding_attention":
            visible &= positions[:, None] - positions[None] < config["sliding_window"]
        hidden = hidden + _linear(w, name + "self_attn.o_proj", attend(q, k, v, visible))
        hidden = hidden + _mlp(w, name + "mlp.", rms_norm(hidden, w[name + "post_attention_layernorm.weight"], eps))
        streams.append(hidden)
    head = w.get("lm_head.weight", w["model.embed_tokens.weight"])
    return rms_norm(hidden, w["model.norm.weight"], eps) @ head.T, streams


def rope_frequencies(config):
    """RoPE's inverse frequencies (d/2,) and the factor on cos and sin, after Hugging Face's formulas.

    Knows the default, linear and YaRN types. Reads rope_theta + rope_scaling (older spelling) or
    rope_parameters; inside the dict rope_theta wins over the one beside it; 10000 if there is none.
    Raises ValueError for any other type.
    """
    scaling = {**(config.get("rope_parameters") or {}), **(config.get("rope_scaling") or {})}
    theta = scaling.get("rope_theta") or config.get("rope_theta") or 10000.0
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    d = _head_dim(config)
    frequencies = theta ** -(np.arange(0, d, 2) / d)
    if kind == "default":
        return frequencies, 1.0
    if kind == "linear":
        return frequencies / scaling["factor"], 1.0
    if kind != "yarn":
        raise ValueError(f"the reference knows rope types default, linear and yarn, got {kind!r}")
    original = scaling.get("original_max_position_embeddings") or config["max_position_embeddings"]
    factor = scaling.get("factor") or config["max_position_embeddings"] / original
    low, high = (
        d * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))
        for turns in (scaling.get("beta_fast") or 32, scaling.get("beta_slow") or 1)
    )
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, d - 1)
    ramp = np.clip((np.arange(d // 2) - low) / ((high - low) or 0.001), 0, 1)
    return frequencies / factor * ramp + frequencies * (1 - ramp), _yarn_attention(scaling, factor)


def _yarn_attention(scaling, factor):
    """YaRN's factor on cos and sin: given, or from mscale and mscale_all_dim, or from the factor alone."""

    def mscale(weight):
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    if scaling.get("attention_factor") is not None:
        return scaling["attention_factor"]
    if scaling.get("mscale") and scaling.get("mscale_all_dim"):
        return mscale(scaling["mscale"]) / mscale(scaling["mscale_all_dim"])
    return mscale(1.0)


def rotate(x, positions, frequencies, factor):
    """RoPE on x (H, S, d) at positions (S,): entry i of the first half turns with entry i of the second."""
    angles = np.asarray(positions, dtype=np.float64)[:, None] * frequencies  # (S, d/2)
    cos, sin = np.cos(angles) * factor, np.sin(angles) * factor
    first, second = np.split(x, 2, axis=-1)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def attend(q, k, v, visible):
    """Softmax attention: q (H, L, d), k and v (Hkv, S, d), visible (L, S) bool -> (L, H*d)."""
    num_heads, length, d = q.shape
    k, v = (np.repeat(x, num_heads // len(x), axis=0) for x in (k, v))  # (H, S, d)
    scores = np.where(visible, q @ k.transpose(0, 2, 1) / math.sqrt(d), -np.inf)  # (H, L, S)
    scores = np.exp(scores - scores.max(-1, keepdims=True))
    out = scores / scores.sum(-1, keepdims=True) @ v  # (H, L, d)
    return out.transpose(1, 0, 2).reshape(length, num_heads * d)


def rms_norm(x, weight, eps):
    """x / rms(x) * weight over the last axis."""
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * weight


def _context_visible(config, layer, positions, context_positions):
    """(L, P): which context rows each block row sees. A sliding layer counts absolute positions."""
    distance = positions[:, None] - context_positions[None]
    if _layer_type(config, layer) == "sliding_attention":
        return distance < config["sliding_window"]
    return np.ones_like(distance, dtype=bool)


def _block_visible(config, layer, positions):
    """(L, L): which rows of its own block each row sees. A sliding layer's window reaches both ways."""
    distance = positions[:, None] - positions[None]
    visible = np.ones_like(distance, dtype=bool)
    if _is_causal(config, layer):
        visible &= distance >= 0
    if _layer_type(config, layer) == "sliding_attention":
        visible &= abs(distance) < config["sliding_window"]
    return visible


def _is_causal(config, layer):
    """is_causal, else dflash_config.causal, else causal in sliding layers and bidirectional in full ones."""
    for value in (config.get("is_causal"), config.get("dflash_config", {}).get("causal")):
        if value is not None:
            return bool(value)
    return _layer_type(config, layer) == "sliding_attention"


def _layer_type(config, layer):
    layer_types = config.get("layer_types")
    return layer_types[layer] if layer_types else "full_attention"


def _option(config, name, default=None):
    """A key of dflash_config, else the same key beside it, else the default."""
    nested = config.get("dflash_config", {})
    return nested[name] if name in nested else config.get(name, default)


def _head_dim(config):
    return config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]


def _keys_values(config, w, name, x, positions):
    """K (normed where a k_norm exists, rotated) and V of the rows x (S, D), each (Hkv, S, d)."""
    k = _heads(config, w, name + "k_proj", x)
    if name + "k_norm.weight" in w:
        k = rms_norm(k, w[name + "k_norm.weight"], config["rms_norm_eps"])
    k = rotate(k, positions, *rope_frequencies(config))
    return k, _heads(config, w, name + "v_proj", x)


def _heads(config, w, name, x):
    """The projection `name` of x (S, D), split into heads: (heads, S, d)."""
    out = _linear(w, name, x)
    return out.reshape(len(x), -1, _head_dim(config)).transpose(1, 0, 2)


def _linear(w, name, x):
    out = x @ w[name + ".weight"].T
    return out + w[name + ".bias"] if name + ".bias" in w else out


def _mlp(w, name, x):
    gate = _linear(w, name + "gate_proj", x)
    silu = gate / (1 + np.exp(-gate))
    return _linear(w, name + "down_proj", silu * _linear(w, name + "up_proj", x))


def _float64(weights):
    return {name: np.asarray(value, dtype=np.float64) for name, value in weights.items()}
