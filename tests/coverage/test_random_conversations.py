"""Conversations on one cache that are ended, interrupted, saved and continued at random, from any thread.

After everything that happens, the next answer is mlx-lm's answer to the tokens that were really said, or the cache is
refused by name at once.
"""

import gc
import random

import mlx.core as mx
import pytest
from mlx_lm.sample_utils import make_sampler
from support.drafts import draft_config
from support.runs import in_thread, make_draft, tokenizer
from support.targets import plain_tokens, tiny_target

import mlx_dflash

CASES = 40
TURNS = 6
FAMILIES = ("qwen3", "llama_sliding", "qwen3_5", "gemma3_text")


class Conversation:
    """A cache, and the tokens that it must cover."""

    def __init__(self, family, rng, folder):
        self.model, self.rng, self.folder = tiny_target(family), rng, folder
        hidden = self.model.layers[0].mlp.gate_proj.weight.shape[-1]
        self.draft = make_draft(draft_config(hidden_size=hidden))
        self.cache = mlx_dflash.make_prompt_cache(self.model, self.draft)
        self.said = []

    def start(self, message, max_tokens, sampler=None):
        return mlx_dflash.stream_generate(
            self.model,
            tokenizer(),
            mx.array(message),
            draft_model=self.draft,
            prompt_cache=self.cache,
            max_tokens=max_tokens,
            sampler=sampler,
        )

    def answer(self):
        """One whole answer, greedy or sampled: mlx-lm's."""
        message, count = self.message(), self.rng.randrange(1, 14)
        sampler, seed = self.rng.choice([None, make_sampler(0.9)]), self.rng.randrange(1000)
        mx.random.seed(seed)
        tokens = [response.token for response in self.start(message, count, sampler)]
        expected = plain_tokens(self.model, [*self.said, *message], count, sampler, seed)
        assert tokens == expected, f"{tokens} instead of {expected} after {self.said}, {message}"
        self.said += [*message, *tokens]

    def message(self):
        return [self.rng.randrange(97) for _ in range(self.rng.randrange(1, 20))]

    def begin(self):
        """An answer of which some tokens were taken; said covers these."""
        message, taken = self.message(), self.rng.randrange(0, 9)
        running = self.start(message, 12)
        tokens = [next(running).token for _ in range(taken)]
        if taken:
            self.said += [*message, *tokens]
        return running

    def closed(self):
        self.begin().close()

    def collected(self):
        running = self.begin()
        del running
        gc.collect()

    def thrown(self):
        running = self.begin()
        with pytest.raises(KeyboardInterrupt):
            running.throw(KeyboardInterrupt())

    def in_another_thread(self):
        if self.is_held():
            refusal = in_thread(lambda: pytest.raises(ValueError, self.start, [1], 2))
            assert "in use" in str(refusal.value)
        else:
            in_thread(self.answer)

    def ended_in_another_thread(self):
        box = [self.begin()]
        in_thread(lambda: box[0].close())
        box.clear()

    def saved_and_loaded(self):
        file = str(self.folder / "cache.safetensors")
        mlx_dflash.save_prompt_cache(file, self.cache)
        self.cache = mlx_dflash.load_prompt_cache(file)

    def refused_while_in_use(self):
        running = self.begin()
        if self.is_held():
            with pytest.raises(ValueError, match="in use"):
                next(self.start([1], 2))
            with pytest.raises(ValueError, match="in use"):
                mlx_dflash.save_prompt_cache(str(self.folder / "no.safetensors"), self.cache)
        running.close()

    def is_held(self):
        return any(hasattr(entry, "lease") for entry in self.cache)


OPERATIONS = (
    "answer",
    "closed",
    "collected",
    "thrown",
    "in_another_thread",
    "ended_in_another_thread",
    "saved_and_loaded",
    "refused_while_in_use",
)


@pytest.mark.parametrize("seed", range(CASES))
def test_every_answer_is_the_one_to_what_was_said(seed, tmp_path):
    rng = random.Random(seed)
    conversation = Conversation(FAMILIES[seed % len(FAMILIES)], rng, tmp_path)
    for _ in range(TURNS):
        getattr(conversation, rng.choice(OPERATIONS))()
    conversation.answer()
    covered = {entry.offset for entry in conversation.cache if isinstance(getattr(entry, "offset", None), int)}
    assert covered - {0} == {len(conversation.said)}
