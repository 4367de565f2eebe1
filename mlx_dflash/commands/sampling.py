"""The sampler that a user's numbers ask for. Knows mlx-lm's sampler; knows nothing of drafts."""

import argparse
from collections.abc import Callable
from typing import Any


def sampler_from(args: argparse.Namespace, tokenizer: Any) -> Callable:
    """The sampler that the sampling flags ask for, as mlx_lm.generate makes it."""
    from mlx_lm.sample_utils import make_sampler

    return make_sampler(
        args.temp,
        args.top_p,
        args.min_p,
        args.min_tokens_to_keep,
        args.top_k,
        args.xtc_probability,
        args.xtc_threshold,
        xtc_special_tokens=tokenizer.encode("\n") + list(tokenizer.eos_token_ids),
    )
