"""A tiny pair that chats: byte tokens, a template with end-of-turn tokens, answers in printable ASCII."""

import mlx.core as mx
import numpy as np

from support.byte_tokenizer import byte_tokenizer
from support.drafts import draft_config, draft_weights
from support.folders import save_draft, save_target
from support.targets import build_target, target_config

EOS_ID = 257
TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
# Drops the reasoning of earlier answers, as many published templates do.
THINKING_TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'].split('</think>')[-1] }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% if enable_thinking %}<think>{% endif %}{% endif %}"
)
SIZES = {"vocab_size": 320, "max_position_embeddings": 4096}


def chat_target(family="qwen3", seed=0, **changes):
    """A random target whose head says only printable ASCII and <eos>. Returns (model, config)."""
    config = target_config(family, **SIZES, **changes)
    model = build_target(config, seed=seed)
    row = np.zeros((SIZES["vocab_size"], 1), dtype=np.float32)
    row[32:127] = 1
    row[EOS_ID] = 1.5
    head_of(model).weight = head_of(model).weight * mx.array(row)
    mx.eval(model.parameters())
    return model, config


def chat_draft(folder, target, **changes):
    """Save a draft that proposes "6", which these targets say often; it computes its context like any other draft."""
    config = draft_config(**{**SIZES, "dflash": {"mask_token_id": SIZES["vocab_size"] - 1}, **changes})
    weights = draft_weights(config)
    for name in weights:
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weights[name] = np.zeros_like(weights[name])
    # These zeros leave the mask's embedding as the last hidden state, and the final norm turns it into the row of "6".
    mask = np.array(target.model.embed_tokens.weight[-1]).astype(np.float64)
    row = np.array(head_of(target).weight[ord("6")]).astype(np.float64)
    weights["norm.weight"] = (row / (mask / np.sqrt(np.mean(mask**2) + 1e-6))).astype(np.float32)
    return save_draft(folder, config, weights)


def head_of(target):
    return target.lm_head if hasattr(target, "lm_head") else target.model.embed_tokens


def save_pair(folder, template=TEMPLATE, more_tokens=(), **draft_changes):
    """Write the pair as two folders; returns their paths, target first.

    more_tokens: special tokens for the template. draft_changes: keys of the draft's config.
    """
    model, config = chat_target()
    tokenizer = byte_tokenizer(chat_template=template)
    tokenizer._tokenizer.add_tokens(list(more_tokens), special_tokens=True)
    config = {**config, "eos_token_id": EOS_ID}
    return save_target(folder / "target", model, config, tokenizer), chat_draft(
        folder / "draft", model, **draft_changes
    )
