"""The target's own answers to prompts: text that a draft can learn to foresee.

Many prompts at a time by mlx-lm's batch generator, or one by one, through a draft if there is one, where the model's
caches do not batch. Knows prompts and mlx-lm; knows nothing of training.
"""

import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.generate import BatchGenerator
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.sample_utils import make_sampler

from ...api import stream_generate
from ...commands.prompt_files import Prompt
from .corpus import Sample

_AHEAD = 2  # batches of prompts that are waiting
_READ = 8  # prompts read at a time
_SAME = 0.1  # of the probability may lie elsewhere: rounding moves less, padding that is read much more


@dataclass(frozen=True)
class Style:
    """The way in which answers are made.

    sampled_share: of the prompts, answered at this temperature and top_p; the others are answered greedily.
    """

    max_tokens: int = 256
    sampled_share: float = 0.5
    temperature: float = 0.7
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self):
        if self.max_tokens < 2:
            raise ValueError(f"max_tokens must be 2 or more, got {self.max_tokens}")
        if not 0 <= self.sampled_share <= 1:
            raise ValueError(f"the share of sampled answers must be 0 to 1, got {self.sampled_share}")
        if self.sampled_share and self.temperature <= 0:
            raise ValueError(f"sampled answers need a temperature above 0, got {self.temperature}")

    def is_greedy(self, source: int) -> bool:
        """Whether the answer to prompt number `source` is greedy; the same in every run."""
        return random.Random(self.seed * 1_000_003 + source).random() >= self.sampled_share

    def sampler(self) -> Callable[[mx.array], mx.array]:
        """Return the sampler of the answers that are not greedy."""
        return make_sampler(self.temperature, self.top_p)


def can_batch(model: Any) -> bool:
    """Whether mlx-lm can run several sequences of a model at a time, and each as if it were alone."""
    if not all(hasattr(cache, "merge") for cache in make_prompt_cache(model)):
        return False
    # Some recurrences read the padding of the shorter prompt.
    prompts = [[1, 2], list(range(1, 9))]
    together, alone = _chances(model, prompts), [_chances(model, [prompt])[0] for prompt in prompts]
    return all(mx.abs(one - other).sum().item() < 2 * _SAME for one, other in zip(together, alone))


def _chances(model: Any, prompts: list[list[int]]) -> list[mx.array]:
    """The distributions (V,) behind prompts that run at the same time."""
    generator = BatchGenerator(model, max_tokens=1)
    places, found = generator.insert(prompts), {}
    try:
        while len(found) < len(prompts):
            found |= {
                response.uid: mx.exp(response.logprobs.astype(mx.float32)) for response in generator.next_generated()
            }
    finally:
        generator.close()
    return [found[place] for place in places]


def batched_answers(
    model: Any, tokenizer: Any, todo: Iterable[tuple[int, Prompt]], style: Style, batch_size: int
) -> Iterator[Sample]:
    """Answer prompts, each with its number, batch_size of them at a time, in the order in which they are finished."""
    waiting = iter(todo)
    asked: dict[int, tuple[int, Prompt]] = {}
    answers: dict[int, list[int]] = {}
    sampler, greedy = style.sampler(), make_sampler(0.0)
    stop_tokens = [[token] for token in tokenizer.eos_token_ids]
    sizes = dict(completion_batch_size=batch_size, prefill_batch_size=min(batch_size, _READ))
    generator = BatchGenerator(model, max_tokens=style.max_tokens, stop_tokens=stop_tokens, **sizes)
    try:
        while True:
            while len(asked) < _AHEAD * batch_size and (following := next(waiting, None)) is not None:
                source, prompt = following
                (uid,) = generator.insert([prompt.ids], samplers=[greedy if style.is_greedy(source) else sampler])
                asked[uid], answers[uid] = following, []
            if not asked:
                return
            for response in generator.next_generated():
                answers[response.uid].append(response.token)
                if response.finish_reason is not None:
                    source, prompt = asked.pop(response.uid)
                    yield _sample(source, prompt, answers.pop(response.uid), style)
    finally:
        generator.close()


def single_answers(pair: tuple[Any, Any, Any], todo: Iterable[tuple[int, Prompt]], style: Style) -> Iterator[Sample]:
    """Answer prompts one after the other. pair: model, tokenizer, and a draft or None."""
    model, tokenizer, draft = pair
    options = {} if draft is None else {"draft_model": draft, "block_size": "auto"}
    for source, prompt in todo:
        sampler = None if style.is_greedy(source) else style.sampler()
        responses = stream_generate(
            model, tokenizer, prompt.ids, max_tokens=style.max_tokens, sampler=sampler, **options
        )
        yield _sample(source, prompt, [response.token for response in responses], style)


def _sample(source: int, prompt: Prompt, answer: list[int], style: Style) -> Sample:
    return Sample(prompt.ids + answer, len(prompt.ids), source, prompt.kind, style.is_greedy(source))
