"""A pair: a target and its draft, and what they know of each other.

A draft reads its target's hidden states and borrows its embedding and head, so the two have to agree; and what is
learned of both together, such as the seconds of a round, belongs to neither alone.
Knows models and drafts; knows nothing of text, of sampling or of what the rounds decide.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from .checkpoints.drafts import load_draft
from .checkpoints.known_pairs import NO_DRAFT, find_draft
from .checkpoints.targets import load
from .dice import Dice
from .draft.config import DraftConfig
from .draft.model import DraftModel
from .drafter import Drafter
from .files.hub import local_path
from .models.probe import probe
from .models.structure import Structure, check_layer_ids
from .pace import ReadingPace
from .target import Target

_REHEARSED_TOKENS = 8
_FIRST_STEP = 64  # tokens that a CPU reads in one step while its speed is unknown


@dataclass
class Acquaintance:
    """The common knowledge of a draft and one target.

    borrowed_head: (1, L, H) -> (1, L, Vd), rows of the target's head, for a reduced head that has no weights of its
    own. round_seconds: seconds of a round by its number of drafts, as far as they were measured. reading_pace: of
    prompts.
    """

    borrowed_head: Callable[[mx.array], mx.array] | None = None
    round_seconds: dict[int, float] = field(default_factory=dict)
    reading_pace: ReadingPace = field(default_factory=lambda: ReadingPace(_first_step()))


class Pair:
    """A target and a draft that fit together.

    The first pair of two models is checked, and its kernels are rehearsed; later ones know what it learned, as long
    as both models live.
    Raises ValueError that names both sides if the draft cannot read this target.
    """

    def __init__(self, model: nn.Module, draft: DraftModel):
        self.model, self.draft = model, draft
        self.structure = Structure(model)
        known = draft.known_targets.get(model)
        self._known: Acquaintance = known or self._get_acquainted()

    def _get_acquainted(self) -> Acquaintance:
        _check(self.model, self.draft, self.structure)
        self._known = Acquaintance(_borrowed_head(self.draft, self.structure))
        if self.draft.kernels.can_run:
            self._rehearse()
        self.draft.known_targets.add(self.model, self._known)
        return self._known

    @property
    def round_seconds(self) -> dict[int, float]:
        """Seconds of a round by its number of drafts; a Pace learns them further, in place."""
        return self._known.round_seconds

    @property
    def head(self) -> Callable[[mx.array], mx.array]:
        """The target's head for the draft: (1, L, H) -> (1, L, V), or (1, L, Vd) of only the draft's tokens."""
        return self._known.borrowed_head or self.structure.unembed

    def drafter(self, dice: Dice, contexts: list[Any] | None = None, block_size: int | None = None) -> Drafter:
        """Return a drafter for one sequence. contexts: its context caches. block_size: None for the draft's own."""
        return Drafter(self.draft, self.structure.embed, self.head, dice, contexts, block_size)

    def target(self, caches: list[Any] | None, block_size: int, **options: Any) -> Target:
        """Return the target as one sequence sees it. block_size: most rows of a verify. options: see Target."""
        taps, kernels = self.draft.config.target_layer_ids, self.draft.kernels
        options = {"structure": self.structure, "reading_pace": self._known.reading_pace, **options}
        return Target(self.model, taps, caches, block_size, kernels, **options)

    def _rehearse(self) -> None:
        """Compute rounds of a made-up text, so that all kernels are chosen and compiled before the first real round."""
        drafter = self.drafter(Dice())
        block_size = drafter.num_drafts + 1
        target = self.target(None, block_size)
        target.prefill(mx.zeros((_REHEARSED_TOKENS,), mx.uint32), drafter.extend_context)

        def play(rows: int) -> None:
            scores = target.verify(0, mx.zeros((rows - 1,), mx.uint32))
            mx.eval(drafter.draft_logits(0, rows - 1), scores.logits)
            target.commit(0)

        self.draft.kernels.prepare(play, block_size)
        mx.clear_cache()


def load_pair(model: str, draft_model: str | None = None, **options: Any) -> tuple[nn.Module, Any, DraftModel | None]:
    """Load a target, its tokenizer and its draft by name.

    model, draft_model: folders or hub repositories, or "demo". draft_model: None finds the public draft of the target,
    "none" loads no draft. options: see load. Returns (model, tokenizer, draft or None).
    Raises ValueError if no draft is known, or if the two do not belong together.
    """
    local_path(model)  # a path that does not exist is told before anything else
    draft_name = draft_model or find_draft(model)
    if draft_name is None:
        raise ValueError(
            f"no public DFlash draft is known for {model}; name one with draft_model (--draft-model), or {NO_DRAFT!r} "
            "to generate without a draft"
        )
    target, tokenizer = load(model, **options)
    if draft_name == NO_DRAFT:
        return target, tokenizer, None
    draft = load_draft(draft_name)
    Pair(target, draft)
    return target, tokenizer, draft


def mismatches(config: DraftConfig, num_layers: int, hidden_size: int | None, vocab_size: int) -> list[str]:
    """Say in words what of a draft's config does not fit a target; an empty list if everything does.

    num_layers, hidden_size, vocab_size: the target's. hidden_size: the width of its embedding, None for a draft that
    borrows nothing.
    """
    found = []
    if config.num_target_layers not in (None, num_layers):
        found.append(
            f"the draft was trained for a target of {config.num_target_layers} layers, this target has {num_layers}"
        )
    if config.vocab_size != vocab_size:
        found.append(f"the draft has a vocabulary of {config.vocab_size} tokens, the target one of {vocab_size}")
    if hidden_size not in (None, config.hidden_size):
        found.append(f"the draft's hidden size is {config.hidden_size}, the target's embedding has width {hidden_size}")
    return found


def head_rows(structure: Structure, ids: mx.array) -> Callable[[mx.array], mx.array]:
    """Return a head (1, L, H) -> (1, L, n) of the rows ids (n,) of the target's head, quantized as they are there."""
    module = structure.unembed if isinstance(structure.unembed, nn.Module) else structure.embedding
    rows = {name: value[ids] for name, value in module.items() if isinstance(value, mx.array)}
    mx.eval(rows)
    weight, scales, bias = rows["weight"], rows.get("scales"), rows.get("bias", 0.0)
    if scales is None:
        return lambda hidden: hidden @ weight.T + bias
    options = dict(transpose=True, group_size=module.group_size, bits=module.bits, mode=module.mode)
    return lambda hidden: mx.quantized_matmul(hidden, weight, scales, rows.get("biases"), **options) + bias


def _first_step() -> float:
    """Tokens of the first step of reading. A GPU seldom needs shorter steps than mlx-lm's, and begins with those."""
    return _FIRST_STEP if mx.default_device().type == mx.cpu else float("inf")


def _borrowed_head(draft: DraftModel, structure: Structure) -> Callable[[mx.array], mx.array] | None:
    if draft.token_ids is None or "lm_head" in draft:
        return None
    return head_rows(structure, draft.token_ids)


def _check(model: nn.Module, draft: DraftModel, structure: Structure) -> None:
    """Raise ValueError if the draft cannot read the target's hidden states or share its vocabulary."""
    config = draft.config
    check_layer_ids(config.target_layer_ids, len(structure.layers))
    borrows = "embed_tokens" not in draft or "lm_head" not in draft
    width = structure.embed(mx.array([[0]])).shape[-1] if borrows else None
    for mismatch in mismatches(config, len(structure.layers), width, structure.vocab_size):
        raise ValueError(mismatch)
    width = probe(model, config.target_layer_ids, structure)
    if width != config.target_hidden_size:
        raise ValueError(
            f"the draft expects hidden states of width {config.target_hidden_size}, the target's layers give {width}"
        )
