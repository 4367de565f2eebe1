"""The one pair that a server serves, and what it can do. Knows flags and models; knows nothing of requests."""

import argparse
from functools import cached_property
from typing import Any

from ..caches.saved import make_prompt_cache
from ..commands.loading import load_pair
from ..demo import DEMO
from ..grammars import Grammars
from ..models.context_length import context_length
from ..models.structure import Structure
from .token_texts import TokenTexts


class Provider:
    """The pair that the flags name, once load() has loaded it.

    flags: of the command. name: the model's name in the API. draft: None if the target is served alone. vocab_size:
    columns of the target's logits. most_drafts: drafts of a round, at most. context_length: most tokens of prompt and
    text together, None if the model does not say.
    """

    def __init__(self, flags: argparse.Namespace):
        self.flags, self.name = flags, flags.model or DEMO

    def load(self) -> None:
        """Load the pair, in the thread that will generate. Raises ValueError if the two do not belong together."""
        self.model, self.tokenizer, self.draft = load_pair(self.flags)
        if self.flags.chat_template:
            self.tokenizer.chat_template = self.flags.chat_template
            self.tokenizer.has_chat_template = True
        self.vocab_size = Structure(self.model).vocab_size
        self.most_drafts = self.draft.config.num_drafts if self.draft is not None else 0
        self.context_length = context_length(self.model)

    def unload(self) -> None:
        """Release the models."""
        self.model = self.draft = None

    def make_cache(self) -> list[Any]:
        """Make empty caches of the target, followed by those of the draft."""
        return make_prompt_cache(self.model, self.draft)

    @cached_property
    def token_texts(self) -> TokenTexts:
        """The texts of this tokenizer's tokens."""
        return TokenTexts(self.tokenizer)

    @cached_property
    def grammars(self) -> Grammars:
        """The grammars of this tokenizer. Raises ValueError if structured output is not available."""
        return Grammars(self.tokenizer, self.vocab_size)
