"""Replay of rounds: how many drafts would be kept on text that the target has already written (greedily).

The rounds are those of a session, with the drafter and its caches as in generation; only the verify is read off the
text, which is what the target would say. Knows the drafter; knows nothing of training.
"""

from collections.abc import Sequence

import mlx.core as mx

from ..accept import accept
from ..dice import Dice
from ..draft.model import DraftModel
from ..drafter import Drafter
from ..models.structure import Structure
from ..stats import Stats
from .lessons import Lesson


def replay(draft: DraftModel, structure: Structure, lessons: Sequence[Lesson], max_tokens: int) -> Stats:
    """Run the rounds of the first max_tokens tokens of each answer; return their counts."""
    stats = Stats()
    for lesson in lessons:
        _replay_one(Drafter(draft, structure.embed, structure.unembed, Dice()), lesson, max_tokens, stats)
    return stats


def _replay_one(drafter: Drafter, lesson: Lesson, max_tokens: int, stats: Stats) -> None:
    tokens = lesson.tokens.tolist()[: lesson.prompt_length + max_tokens]
    features = lesson.features[None].astype(mx.float32)
    at = lesson.prompt_length
    drafter.extend_context(features[:, :at])
    while at < len(tokens) - 1:
        drafts = drafter.propose(tokens[at], min(drafter.num_drafts, len(tokens) - at - 2)).tolist()
        # The row behind the last draft says what the target says there.
        verdict = accept(drafts, tokens[at + 1 : at + 2 + len(drafts)])
        drafter.extend_context(features[:, at : at + verdict.num_accepted + 1])
        at += verdict.num_accepted + 1
        stats.count(len(drafts), verdict.num_accepted)
