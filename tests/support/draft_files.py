"""Drafts written in the layouts of other projects, and what a draft on disk computes."""

import gguf
import mlx.core as mx
import numpy as np

import mlx_dflash
from mlx_dflash.dice import Dice
from mlx_dflash.drafter import Drafter
from support.drafts import draft_config, draft_inputs

SLIDING = "sliding_attention"
NUM_CONTEXT = 12


def logits_of(path, embed=None, head=None, config=None):
    """Logits and proposal of the draft in a folder or file."""
    return logits_of_draft(mlx_dflash.load_draft(str(path)), embed, head, config)


def logits_of_draft(draft, embed=None, head=None, config=None):
    """Draft logits and proposal behind a fixed random context, with the target's (or these) embedding and head."""
    config = config or draft_config()
    features, table, rows = draft_inputs(config, NUM_CONTEXT)
    table, rows = mx.array(table if embed is None else embed), mx.array(rows if head is None else head)
    drafter = Drafter(draft, lambda ids: table[ids], lambda h: h @ rows.T, Dice())
    drafter.extend_context(mx.array(features[None]))
    return np.array(drafter.draft_logits(7)), drafter.propose(7, 99).tolist()


def speculators_config(config, **changes):
    """The same draft as speculators describes it: the backbone nested, tap layers one higher."""
    nested = config["dflash_config"]
    backbone = {k: v for k, v in config.items() if k not in ("dflash_config", "architectures")}
    moved = {k: v for k, v in nested.items() if k != "target_layer_ids"}
    return {
        "architectures": ["DFlashSpeculator"],
        "speculators_model_type": "dflash2" if "selector_rank" in nested else "dflash",
        "transformer_layer_config": backbone,
        "draft_vocab_size": config["vocab_size"],
        "aux_hidden_state_layer_ids": [i + 1 for i in nested["target_layer_ids"]],
        "speculators_config": {"algorithm": "dflash", "verifier": {"name_or_path": "some/target"}},
        **moved,
        **changes,
    }


GGUF_NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "attention_conv.base_kernel": "attn_conv_base",
    "mlp_conv.base_kernel": "ffn_conv_base",
    "attention_conv.kernel_projection": "attn_conv_proj",
    "mlp_conv.kernel_projection": "ffn_conv_proj",
    "self_attn.attention_sink_bias": "attn_sinks",
    "candidate_selector.hidden_projection": "selector_hidden",
    "candidate_selector.predecessor_codebook": "selector_predecessor.weight",
    "candidate_selector.successor_codebook": "selector_successor.weight",
    "hidden_norm": "enc.output_norm",
    "fc": "fc",
}


def write_gguf_draft(path, config, weights, kind=gguf.GGMLQuantizationType.F32):
    """Write a draft as llama.cpp's converter does; `kind` for the matrices whose rows divide into its blocks."""
    writer, nested = gguf.GGUFWriter(path, "dflash"), config["dflash_config"]
    numbers = {
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": config["head_dim"],
        "vocab_size": config["vocab_size"],
        "block_size": nested["block_size"],
    }
    numbers |= {
        key: nested[key]
        for key in ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
        if key in nested
    }
    if "sliding_window" in config:
        numbers["attention.sliding_window"] = config["sliding_window"]
        writer.add_array("dflash.attention.sliding_window_pattern", [t == SLIDING for t in config["layer_types"]])
    for key, value in numbers.items():
        writer.add_uint32("dflash." + key, value)
    writer.add_float32("dflash.attention.layer_norm_rms_epsilon", config["rms_norm_eps"])
    writer.add_float32("dflash.rope.freq_base", config["rope_theta"])
    writer.add_array("dflash.target_layers", [i + 1 for i in nested["target_layer_ids"]])
    writer.add_uint32("tokenizer.ggml.mask_token_id", nested["mask_token_id"])
    if config.get("is_causal") is not None:
        writer.add_bool("dflash.attention.causal", config["is_causal"])
    for name, weight in weights.items():
        stem = name.removesuffix(".weight")
        layer, _, rest = stem.removeprefix("layers.").partition(".")
        new = f"blk.{layer}.{GGUF_NAMES[rest]}" if stem.startswith("layers.") else GGUF_NAMES.get(stem, "output_norm")
        new += ".weight" if name.endswith(".weight") else ""
        is_matrix = (
            weight.ndim == 2 and weight.shape[1] % gguf.GGML_QUANT_SIZES[kind][0] == 0 and "codebook" not in name
        )
        stored = gguf.quants.quantize(weight, kind) if is_matrix else weight
        writer.add_tensor(new, stored, raw_dtype=kind if is_matrix else None)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
