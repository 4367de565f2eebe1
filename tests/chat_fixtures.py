"""A tiny pair that chats: byte tokens, a template with end-of-turn tokens, answers in printable ASCII."""

import mlx.core as mx
import numpy as np
from fixtures import byte_tokenizer, draft_config, draft_weights, save_draft, save_target, target_config, build_target

EOS_ID = 257
TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}<eos>{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)
# Drops the reasoning of earlier answers, as many published templates do.
THINKING_TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'].split('</think>')[-1] }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% if enable_thinking %}<think>{% endif %}{% endif %}"
)
SIZES = {"vocab_size": 320, "max_position_embeddings": 4096}
DRAFT_SIZES = {**SIZES, "dflash": {"mask_token_id": 319}}


def chat_target(family="qwen3", seed=0, **changes):
    """A random target whose head says only printable ASCII and <eos>. Returns (model, config)."""
    config = target_config(family, **SIZES, **changes)
    model = build_target(config, seed=seed)
    row = np.zeros((SIZES["vocab_size"], 1), dtype=np.float32)
    row[32:127] = 1
    row[EOS_ID] = 1.5
    head = model.lm_head if hasattr(model, "lm_head") else model.model.embed_tokens
    head.weight = head.weight * mx.array(row)
    mx.eval(model.parameters())
    return model, config


def chat_draft_config(**changes):
    return draft_config(**{**DRAFT_SIZES, **changes})


def save_pair(folder, template=TEMPLATE):
    """Write the pair as two folders; returns their paths, target first."""
    model, config = chat_target()
    config = {**config, "eos_token_id": EOS_ID}
    tokenizer = byte_tokenizer(chat_template=template)
    draft = chat_draft_config()
    return save_target(folder / "target", model, config, tokenizer), save_draft(folder / "draft", draft, draft_weights(draft))
