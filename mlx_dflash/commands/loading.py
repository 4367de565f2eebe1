"""The target and the draft that the flags name. Knows the flags and the names of known pairs."""

import argparse
import json
from typing import Any

from .flags import NO_DRAFT


def load_pair(args: argparse.Namespace, metadata: dict[str, str] | None = None) -> tuple[Any, Any, Any]:
    """Load what --model and --draft-model name. Returns (model, tokenizer, draft or None)."""
    from ..checkpoints.drafts import load, load_draft
    from ..checkpoints.known_pairs import find_draft

    name = args.model or (metadata or {}).get("model") or "demo"
    draft_name = args.draft_model or find_draft(name)
    if draft_name is None:
        raise ValueError(
            f"no public DFlash draft is known for {name}; give --draft-model, or --draft-model {NO_DRAFT} to generate without one"
        )
    tokenizer_config = {
        "trust_remote_code": args.trust_remote_code,
        **json.loads((metadata or {}).get("tokenizer_config", "{}")),
    }
    model, tokenizer = load(
        name,
        tokenizer_config=tokenizer_config,
        model_config={"quantize_activations": args.quantize_activations},
        adapter_path=args.adapter_path,
        trust_remote_code=args.trust_remote_code,
    )
    for token in args.extra_eos_token:
        tokenizer.add_eos_token(token)
    return model, tokenizer, None if draft_name == NO_DRAFT else load_draft(draft_name)
