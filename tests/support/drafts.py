"""Tiny drafts: their published configs, shapes and seeded weights, with nothing of the product."""

import numpy as np

from support.targets import _LLAMA, _changed

MASK_ID = 96


def draft_config(dflash=None, **changes):
    """The config.json of a tiny DFlash 1 draft, as published; a fresh dict.

    Two full layers on hidden 32, taps [0, 2] of 4, block 6, mask id 96. dflash: changes inside
    dflash_config; changes: keys beside it. None removes a key.
    """
    top = {
        **_LLAMA,
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "hidden_act": "silu",
        "attention_bias": False,
        "num_hidden_layers": 2,
        "num_target_layers": 4,
        "layer_types": ["full_attention", "full_attention"],
        "dtype": "float32",
    }
    nested = {"target_layer_ids": [0, 2], "mask_token_id": MASK_ID, "block_size": 6}
    config = _changed(top, {"dflash_config": _changed(nested, dflash or {}), **changes})
    if "sliding_attention" in config.get("layer_types", []):
        config.setdefault("sliding_window", 8)
        config.setdefault("use_sliding_window", True)
    return config


def draft_weights(config, seed=1, scale=0.3, mask_embedding=False):
    """Seeded float32 weights for a draft config: z-lab tensor name -> array.

    With attention_bias in the config also the biases; with mask_embedding=True a learned mask vector.
    """
    rng = np.random.RandomState(seed)
    weights = {}
    for name, shape in draft_shapes(config).items():
        noise = rng.standard_normal(shape)
        is_norm = name.endswith("norm.weight")
        weights[name] = (1 + 0.1 * noise if is_norm else scale * noise).astype(np.float32)
    if mask_embedding:
        weights["mask_embedding"] = rng.standard_normal(config["hidden_size"]).astype(np.float32)
    return weights


def draft2_config(dflash=None, **changes):
    """The config.json of a tiny DFlash 2 draft: draft_config with convolutions (2 taps, groups of 4) and a selector."""
    version_2 = {"conv_kernel_size": 2, "conv_group_size": 4, "selector_rank": 5, "selector_top_k": 4}
    return draft_config(
        {**version_2, **(dflash or {})}, **{"architectures": ["DFlash2DraftModel"], "is_causal": False, **changes}
    )


def draft_shapes(config):
    """Tensor name -> shape of a DFlash checkpoint, in z-lab's order and names: version 2 if it has a selector."""
    hidden, wide = config["hidden_size"], config["intermediate_size"]
    d = config.get("head_dim") or hidden // config["num_attention_heads"]
    q_rows, kv_rows = config["num_attention_heads"] * d, config["num_key_value_heads"] * d
    taps = config["dflash_config"].get("target_layer_ids", config.get("target_layer_ids"))
    target_hidden = config.get("target_hidden_size", hidden)
    shapes = {"fc.weight": (hidden, len(taps) * target_hidden)}
    shapes |= {"hidden_norm.weight": (hidden,), "norm.weight": (hidden,)}
    for i in range(config["num_hidden_layers"]):
        attention, mlp = f"layers.{i}.self_attn.", f"layers.{i}.mlp."
        shapes[f"layers.{i}.input_layernorm.weight"] = (hidden,)
        shapes[f"layers.{i}.post_attention_layernorm.weight"] = (hidden,)
        projections = {"q": (q_rows, hidden), "k": (kv_rows, hidden), "v": (kv_rows, hidden), "o": (hidden, q_rows)}
        for letter, shape in projections.items():
            shapes[f"{attention}{letter}_proj.weight"] = shape
            if config.get("attention_bias"):
                shapes[f"{attention}{letter}_proj.bias"] = shape[:1]
        shapes |= {f"{attention}q_norm.weight": (d,), f"{attention}k_norm.weight": (d,)}
        shapes |= {f"{mlp}gate_proj.weight": (wide, hidden), f"{mlp}up_proj.weight": (wide, hidden)}
        shapes[f"{mlp}down_proj.weight"] = (hidden, wide)
        if config["dflash_config"].get("attention_sink_bias"):
            shapes[f"{attention}attention_sink_bias"] = (config["num_attention_heads"],)
    return shapes | _version_2_shapes(config, hidden)


def _version_2_shapes(config, hidden):
    sizes = config["dflash_config"]
    if "selector_rank" not in sizes:
        return {}
    taps, groups, rank = sizes["conv_kernel_size"], hidden // sizes["conv_group_size"], sizes["selector_rank"]
    shapes = {}
    for i in range(config["num_hidden_layers"]):
        for conv in ("attention_conv", "mlp_conv"):
            shapes[f"layers.{i}.{conv}.base_kernel"] = (2, taps, hidden)
            shapes[f"layers.{i}.{conv}.kernel_projection.weight"] = (2 * taps * groups, hidden)
    shapes["candidate_selector.hidden_projection.weight"] = (rank, hidden)
    for side in ("predecessor", "successor"):
        shapes[f"candidate_selector.{side}_codebook"] = (config["vocab_size"], rank)
    return shapes


def draft_inputs(config, num_context, seed=2):
    """Seeded float32 features (P, T*D), embedding table (V, D) and head (V, D) for a draft of this config."""
    rng = np.random.RandomState(seed)
    table_shape = config["vocab_size"], config["hidden_size"]
    embed, head = rng.standard_normal(table_shape), 0.3 * rng.standard_normal(table_shape)
    features = rng.standard_normal((num_context, draft_shapes(config)["fc.weight"][1]))
    return tuple(array.astype(np.float32) for array in (features, embed, head))
