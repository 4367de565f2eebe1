"""The context that an mlx-lm model was made for. Knows where models keep this number; knows nothing of caches."""

from typing import Any

_NAME = "max_position_embeddings"


class Overlong(ValueError):
    """A prompt that the model's context cannot hold."""


def context_length(model: Any) -> int | None:
    """Return the most tokens of prompt and text together that the model was made for, or None if it does not say.

    A model that also sees or hears keeps the number in its text_config, a dict or an object.
    """
    args = getattr(model, "args", None)
    nested = getattr(args, "text_config", None)
    found = getattr(args, _NAME, None)
    if not found:
        found = nested.get(_NAME) if isinstance(nested, dict) else getattr(nested, _NAME, None)
    return found or None


def refuse_overlong(model: Any, prompt_length: int) -> None:
    """Raise Overlong that tells the numbers if the model's context has no room for a token after the prompt."""
    limit = context_length(model)
    if limit is not None and prompt_length >= limit:
        raise Overlong(f"the prompt has {prompt_length} tokens; the model's context has {limit}")
