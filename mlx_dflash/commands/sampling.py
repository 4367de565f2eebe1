"""The sampler that a user's numbers ask for. Knows mlx-lm's sampler; knows nothing of drafts."""

import argparse
import math
from collections.abc import Callable
from typing import Any

# As mlx-lm's make_sampler names them; a flag, a setting or a field of a request may have another name.
NUMBERS = ("temp", "top_p", "min_p", "min_tokens_to_keep", "top_k", "xtc_probability", "xtc_threshold")
# Least and greatest value of each.
RANGES = {
    "temp": (0, math.inf),
    "top_p": (0, 1),
    "min_p": (0, 1),
    "min_tokens_to_keep": (1, math.inf),
    "top_k": (0, math.inf),
    "xtc_probability": (0, 1),
    "xtc_threshold": (0, 0.5),
}
# Below this temperature log-probabilities divided by it overflow float32; the likeliest token is all that is left.
_COLDEST = 1e-30


def sampler(tokenizer: Any, **numbers: Any) -> Callable:
    """Make mlx-lm's sampler. numbers: those in NUMBERS that differ from mlx-lm's defaults.

    XTC never removes the tokens that end a line or the text. Raises TypeError for a number that is not in NUMBERS.
    """
    from mlx_lm.sample_utils import make_sampler

    if unknown := sorted(set(numbers) - set(NUMBERS)):
        raise TypeError(f"a sampler takes {', '.join(NUMBERS)}; got {', '.join(unknown)}")
    if numbers.get("temp", 0.0) < _COLDEST:
        numbers["temp"] = 0.0
    ends = tokenizer.encode("\n") + list(tokenizer.eos_token_ids)
    return make_sampler(**numbers, xtc_special_tokens=ends)


def sampler_from(args: argparse.Namespace, tokenizer: Any) -> Callable:
    """Make the sampler that the flags of add_sampling_flags ask for, as mlx_lm.generate makes it."""
    return sampler(tokenizer, **{name: getattr(args, name) for name in NUMBERS})


def check_sampling(args: argparse.Namespace) -> None:
    """Raise ValueError for a flag of add_sampling_flags that is out of its range."""
    check_numbers({"--" + name.replace("_", "-"): getattr(args, name) for name in NUMBERS})


def check_numbers(numbers: dict[str, float]) -> None:
    """Raise ValueError for a number of a sampler that is out of its range. numbers: each by the user's name for it."""
    for name, number in numbers.items():
        least, most = RANGES[name.lstrip("-").replace("-", "_")]
        if not least <= number <= most or number == math.inf:
            upper = " or more" if most == math.inf else f" to {most:g}"
            raise ValueError(f"{name} must be a number of {least:g}{upper}, got {number}")
