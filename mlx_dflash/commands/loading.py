"""The target and the draft that the flags name. Knows the flags; how a pair is loaded by name is pair.py's."""

import argparse
import sys
from typing import Any

from ..blas import advice
from ..demo import DEMO
from ..files.json_text import parse_json


def load_pair(args: argparse.Namespace, metadata: dict[str, str] | None = None) -> tuple[Any, Any, Any]:
    """Load what --model and --draft-model name. Returns (model, tokenizer, draft or None).

    metadata: of a saved prompt cache, whose target and tokenizer options count where the flags say nothing.
    Raises ValueError if no draft is known, if the two do not belong together, or for an unknown --extra-eos-token.
    """
    from .. import pair

    _advise()
    metadata = metadata or {}
    model, tokenizer, draft = pair.load_pair(
        args.model or metadata.get("model") or DEMO,
        args.draft_model,
        tokenizer_config={**_saved_config(metadata), "trust_remote_code": args.trust_remote_code},
        model_config={"quantize_activations": args.quantize_activations},
        adapter_path=args.adapter_path,
        trust_remote_code=args.trust_remote_code,
    )
    for token in args.extra_eos_token:
        tokenizer.add_eos_token(token)
    return model, tokenizer, draft


def _advise() -> None:
    """Say on stderr what makes a CPU faster, if it computes these models and has no fast BLAS."""
    import mlx.core as mx

    told = advice() if mx.default_device().type == mx.cpu else None
    if told:
        print(told, file=sys.stderr)


def _saved_config(metadata: dict[str, str]) -> dict[str, Any]:
    """Return the tokenizer options that a saved prompt cache holds; what it may run is never one of them."""
    text = metadata.get("tokenizer_config", "{}")
    try:
        config = parse_json(text)
    except ValueError:
        config = None
    if not isinstance(config, dict):
        raise ValueError(f"tokenizer_config of the prompt cache must be a JSON object, got {text[:60]!r}")
    return config
