"""What DFlash 2 and the rarer options add to a draft, in plain numpy, float64 inside.

Written from the description, as reference.py is, whose attention and norms it uses; nothing is shared with the
product. Letters: P context rows, L block rows, γ drafts, H hidden, V vocabulary, K candidates, r rank.
"""

import math

import numpy as np

from support import reference as v1


def reference_v2_hidden(config, weights, features, block):
    """Hidden states (L, H) behind the final norm for the embedded block (L, H), context at positions 0 to P - 1.

    Knows the convolutions of DFlash 2, attention sinks and a scale on V; each where the config or weights have it.
    """
    w = {name: np.asarray(value, dtype=np.float64) for name, value in weights.items()}
    eps, scale = config["rms_norm_eps"], _option(config, "attention_value_scale", 1.0)
    context = v1.reference_context_kv(config, weights, features)
    positions, context_positions = len(features) + np.arange(len(block)), np.arange(len(features))
    hidden = np.asarray(block, dtype=np.float64)
    for i, (context_k, context_v) in enumerate(context):
        name = f"layers.{i}."
        visible = np.concatenate(
            [v1._context_visible(config, i, positions, context_positions), v1._block_visible(config, i, positions)],
            axis=1,
        )

        def attention(x):
            q = v1._heads(config, w, name + "self_attn.q_proj", x)
            q = v1.rms_norm(q, w[name + "self_attn.q_norm.weight"], eps)
            q = v1.rotate(q, positions, *v1.rope_frequencies(config))
            k, v = v1._keys_values(config, w, name + "self_attn.", x, positions)
            keys, values = np.concatenate([context_k, k], 1), scale * np.concatenate([context_v, v], 1)
            sinks = w.get(name + "self_attn.attention_sink_bias")
            out = (
                v1.attend(q, keys, values, visible)
                if sinks is None
                else attend_with_sinks(q, keys, values, visible, sinks)
            )
            return v1._linear(w, name + "self_attn.o_proj", out)

        hidden = hidden + around(
            w, name + "attention_conv.", v1.rms_norm(hidden, w[name + "input_layernorm.weight"], eps), attention, config
        )
        hidden = hidden + around(
            w,
            name + "mlp_conv.",
            v1.rms_norm(hidden, w[name + "post_attention_layernorm.weight"], eps),
            lambda x: v1._mlp(w, name + "mlp.", x),
            config,
        )
    return v1.rms_norm(hidden, w["norm.weight"], eps)


def around(w, name, x, sublayer, config):
    """sublayer(x), convolved before and after where the layer has the convolution `name`."""
    if name + "base_kernel" not in w:
        return sublayer(x)
    groups = x.shape[1] // _option(config, "conv_group_size")
    base = w[name + "base_kernel"]  # (2, k, H)
    dynamic = (x @ w[name + "kernel_projection.weight"].T).reshape(len(x), 2, base.shape[1], groups)
    return convolve(sublayer(convolve(x, base[0], dynamic[:, 0])), base[1], dynamic[:, 1])


def convolve(x, base, dynamic):
    """Row i, channel c: the sum over taps t <= i of (base[t, c] + dynamic[i, t, group of c]) * x[i - t, c]."""
    out = np.zeros_like(x)
    group_size = x.shape[1] // dynamic.shape[2]
    for i in range(len(x)):
        for t in range(min(i + 1, len(base))):
            for c in range(x.shape[1]):
                out[i, c] += (base[t, c] + dynamic[i, t, c // group_size]) * x[i - t, c]
    return out


def attend_with_sinks(q, k, v, visible, sinks):
    """Attention in which every head may also look at nothing, with the logit sinks (H,)."""
    k, v = (np.repeat(x, len(q) // len(x), axis=0) for x in (k, v))
    scores = np.where(visible, q @ k.transpose(0, 2, 1) / math.sqrt(q.shape[2]), -np.inf)
    weights = np.exp(scores)
    weights /= weights.sum(-1, keepdims=True) + np.exp(sinks)[:, None, None]
    return (weights @ v).transpose(1, 0, 2).reshape(q.shape[1], -1)


def reference_v2_logits(config, weights, features, anchor, embed, head, from_anchor=False):
    """Logits (γ, V) of every draft, before a selector, and the hidden rows (γ, H) they are read from.

    from_anchor: row i is for the token behind it, and all rows of the block count.
    """
    rows = _option(config, "block_size")
    mask = weights.get("mask_embedding")
    mask = embed[_option(config, "mask_token_id")] if mask is None else np.reshape(mask, -1)
    block = np.array([embed[anchor]] + [mask] * (rows - 1), dtype=np.float64) * _option(
        config, "input_embedding_scale", 1.0
    )
    hidden = reference_v2_hidden(config, weights, features, block)
    hidden = hidden if from_anchor else hidden[1:]
    logits = hidden @ np.asarray(head, dtype=np.float64).T
    logits = logits * _option(config, "output_multiplier", 1.0) * _option(config, "logit_scale", 1.0)
    cap = _option(config, "final_logit_softcapping")
    return (np.tanh(logits / cap) * cap if cap else logits), hidden


def reference_v2_walk(config, weights, logits, hidden, anchor):
    """The greedy path (γ,) of the selector, and the scores of its candidates: a list of {token: score}."""
    w = {name: np.asarray(value, dtype=np.float64) for name, value in weights.items() if "selector" in name}
    projected = hidden @ w["candidate_selector.hidden_projection.weight"].T  # (γ, r)
    before, behind = w["candidate_selector.predecessor_codebook"], w["candidate_selector.successor_codebook"]
    path, scored, previous = [], [], anchor
    for row, h in zip(logits, projected):
        candidates = np.argsort(-row)[: _option(config, "selector_top_k")]
        scores = {int(c): row[c] + np.sum(before[previous] * h * behind[c]) for c in candidates}
        previous = max(scores, key=scores.get)
        path.append(previous)
        scored.append(scores)
    return path, scored


def _option(config, name, default=None):
    value = config.get("dflash_config", {}).get(name)
    value = config.get(name) if value is None else value
    return default if value is None else value
