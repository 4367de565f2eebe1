"""Prompts through a chat template. Knows messages and tokenizers; knows nothing of models."""

import argparse
from typing import Any


def render_prompt(args: argparse.Namespace, tokenizer: Any, message: str, continues: bool) -> list[int]:
    """The prompt's ids, through the chat template unless told otherwise.

    continues: the conversation's beginning is in a cache, so only what follows it is rendered.
    """
    if args.use_default_chat_template and not tokenizer.has_chat_template:
        raise ValueError("this tokenizer has no chat template, and this version of transformers no default one")
    if args.ignore_chat_template or not tokenizer.has_chat_template:
        if args.system_prompt or args.prefill_response:
            raise ValueError("--system-prompt and --prefill-response need a chat template")
        return tokenizer.encode(message)
    messages = [{"role": "system", "content": args.system_prompt}] if args.system_prompt else []
    messages.append({"role": "user", "content": message})
    if args.prefill_response:
        messages.append({"role": "assistant", "content": args.prefill_response})

    def render() -> str:
        return tokenizer.apply_chat_template(
            messages,
            tokenize=False,
            continue_final_message=bool(args.prefill_response),
            add_generation_prompt=not args.prefill_response,
            **args.chat_template_config,
        )

    text = render()
    if continues:
        user = next(m for m in messages if m["role"] == "user")
        user["content"] = "<query>"
        text = text[render().index("<query>") :]
    return tokenizer.encode(text, add_special_tokens=False)
