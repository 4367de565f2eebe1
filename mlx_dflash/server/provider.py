"""The one pair that a server serves: mlx-lm's ModelProvider with a DFlash draft."""

import argparse
from typing import Any

from mlx_lm.server import ModelProvider

from ..caches.saved import make_prompt_cache
from ..commands.loading import load_pair
from ..grammars import Grammars
from ..models.context_length import context_length
from ..models.structure import Structure
from ..pair import Pair


class Provider(ModelProvider):
    """Loads the pair that the flags name, once. name: what /v1/models calls it."""

    def __init__(self, args: argparse.Namespace):
        super().__init__(args)
        self.name = args.model or "demo"
        self._grammars: Grammars | None = None

    def _load(
        self, model_path: str | None, adapter_path: str | None = None, draft_model_path: str | None = None
    ) -> None:
        self.reset()
        self.model, self.tokenizer, self.draft_model = load_pair(self.cli_args)
        if self.cli_args.chat_template:
            self.tokenizer.chat_template = self.cli_args.chat_template
            self.tokenizer.has_chat_template = True
        structure = Structure(self.model) if self.draft_model is None else Pair(self.model, self.draft_model).structure
        self.vocab_size = structure.vocab_size
        self.model_key = (model_path, adapter_path, draft_model_path)

    def load_default(self) -> None:
        self.load("default_model", None, "default_model")

    def make_cache(self) -> list[Any]:
        """Empty caches of the target and, behind them, of the draft."""
        return make_prompt_cache(self.model, self.draft_model)

    @property
    def grammars(self) -> Grammars:
        if self._grammars is None:
            self._grammars = Grammars(self.tokenizer, self.vocab_size)
        return self._grammars

    @property
    def most_drafts(self) -> int:
        """Drafts of a round, at most."""
        return self.draft_model.config.num_drafts if self.draft_model is not None else 0

    @property
    def context_length(self) -> int | None:
        """Most tokens of prompt and text, None if the model does not say."""
        return context_length(self.model)
