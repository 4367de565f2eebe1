"""Prompts through a chat template: the one place where messages become text and ids.

Knows messages and tokenizers of mlx-lm; knows nothing of models.
"""

import argparse
from typing import Any

from jinja2 import TemplateError

# What a template raises on purpose or by mistake: its expressions are Python's.
_FAULTS = (TemplateError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError)


def render(tokenizer: Any, messages: list[dict[str, Any]], **options: Any) -> str:
    """Render messages through the tokenizer's chat template, up to where the answer begins.

    messages: objects with role and content. A last message of the assistant's is the beginning of the answer, and is
    continued. options: of the template. Without a chat template the text is the contents, with empty lines between.
    Raises ValueError if the template fails.
    """
    if not tokenizer.has_chat_template:
        return "\n\n".join(message["content"] for message in messages)
    is_begun = messages[-1]["role"] == "assistant"
    if is_begun:
        options["continue_final_message"] = True
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=not is_begun, **options)
    except _FAULTS as error:
        told = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(f"the chat template of this tokenizer cannot render the messages: {told}") from error


def encode_messages(tokenizer: Any, messages: list[dict[str, Any]], **options: Any) -> list[int]:
    """Return the ids of what render gives; a chat template brings its own special tokens."""
    text = render(tokenizer, messages, **options)
    return tokenizer.encode(text, add_special_tokens=not tokenizer.has_chat_template)


def render_prompt(args: argparse.Namespace, tokenizer: Any, message: str, continues: bool) -> list[int]:
    """Return the ids of the prompt that the flags of add_prompt_flags ask for.

    message: the user's. continues: a cache holds the beginning of the conversation, so only what follows it counts.
    Raises ValueError for flags that need a chat template if there is none.
    """
    if args.use_default_chat_template and not tokenizer.has_chat_template:
        raise ValueError("this tokenizer has no chat template, and this version of transformers no default one")
    if args.ignore_chat_template or not tokenizer.has_chat_template:
        if args.system_prompt or args.prefill_response:
            raise ValueError("--system-prompt and --prefill-response need a chat template")
        return tokenizer.encode(message)

    def rendered(content: str) -> str:
        roles = (("system", args.system_prompt), ("user", content), ("assistant", args.prefill_response))
        messages = [{"role": role, "content": text} for role, text in roles if text or role == "user"]
        return render(tokenizer, messages, **args.chat_template_config)

    text = rendered(message)
    if continues:
        beginning, mark, _ = rendered("<query>").partition("<query>")
        if not mark:
            raise ValueError("the chat template of this tokenizer leaves out the user's message")
        text = text[len(beginning) :]
    return tokenizer.encode(text, add_special_tokens=False)
