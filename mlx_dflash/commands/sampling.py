"""The sampler that a user's numbers ask for. Knows mlx-lm's sampler; knows nothing of drafts."""

import argparse
from collections.abc import Callable
from typing import Any

# As mlx-lm's make_sampler names them; a flag, a setting or a field of a request may have another name.
NUMBERS = ("temp", "top_p", "min_p", "min_tokens_to_keep", "top_k", "xtc_probability", "xtc_threshold")


def sampler(tokenizer: Any, **numbers: Any) -> Callable:
    """Make mlx-lm's sampler. numbers: those in NUMBERS that differ from mlx-lm's defaults.

    XTC never removes the tokens that end a line or the text. Raises TypeError for a number that is not in NUMBERS.
    """
    from mlx_lm.sample_utils import make_sampler

    if unknown := sorted(set(numbers) - set(NUMBERS)):
        raise TypeError(f"a sampler takes {', '.join(NUMBERS)}; got {', '.join(unknown)}")
    ends = tokenizer.encode("\n") + list(tokenizer.eos_token_ids)
    return make_sampler(**numbers, xtc_special_tokens=ends)


def sampler_from(args: argparse.Namespace, tokenizer: Any) -> Callable:
    """Make the sampler that the flags of add_sampling_flags ask for, as mlx_lm.generate makes it."""
    return sampler(tokenizer, **{name: getattr(args, name) for name in NUMBERS})
