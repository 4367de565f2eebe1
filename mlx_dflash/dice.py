"""The dice of one sequence: the caller's sampler and logits processors, and the random keys that go with them.

The target always decides. Row i of a block is rolled with the key that plain generation would use for that position,
so the text is the one plain generation gives with the same seed. The draft guesses with the same sampler and the
same keys, so that both often fall on the same token even at a high temperature.
Knows logits and random keys of one sequence; knows nothing of models or caches.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import cast

import mlx.core as mx
from mlx_lm.sample_utils import greedy_sampler, make_sampler

from .host import read_id, read_ids

Sampler = Callable[[mx.array], mx.array]
LogitsProcessor = Callable[[mx.array, mx.array], mx.array]

# The draft is less sure of itself than the target: its logits are multiplied by this before they meet the dice.
SHARPNESS = 1.25


@dataclass(frozen=True)
class Roll:
    """The target's own tokens for the rows of a block, and their log-probabilities.

    tokens: one a row, up to and including the first that differs from its draft. logprobs: (V,) each, float.
    """

    tokens: list[int]
    logprobs: list[mx.array]


def log_softmax(logits: mx.array) -> mx.array:
    """logits: (1, V). The expression of mlx-lm, so that ties fall the same way."""
    return logits - mx.logsumexp(logits, keepdims=True)


class Dice:
    """Rolls the target's tokens and guesses the draft's.

    sampler: (1, V) log-probabilities to (1,) tokens; None is greedy. logits_processors: f(tokens, logits), each
    given exactly the prompt and the tokens before the row. Both are called row by row, in order, and never for a row
    behind a refused draft, so that those with a memory stay right.
    """

    def __init__(self, sampler: Sampler | None = None, logits_processors: Sequence[LogitsProcessor] | None = None):
        self.sampler = sampler or greedy_sampler
        self.processors = list(logits_processors or [])
        self._is_greedy = self.sampler is greedy_sampler
        # mlx-lm's samplers have no memory, so they may be called for the draft's rows too.
        self._is_pure = getattr(self.sampler, "__module__", None) == make_sampler.__module__
        self._history: mx.array = mx.zeros((0,), mx.uint32)
        self._at = 0  # tokens before the block that was rolled latest
        self._states: list[tuple[int, int]] = []  # random state before the latest roll, and after each of its rows
        self._draws = 0  # random draws that one call of the sampler makes

    # The random stream: ours while we sample, the caller's otherwise.

    def begin(self, prompt: mx.array, at: int = 0) -> None:
        """Take over the random stream as plain generation would find it.

        prompt: (P,) ids, for the processors. at: number of tokens before the first row that will be rolled.
        """
        self._at = at
        self._history = prompt
        self._states = [_state()]
        # Whoever draws meanwhile, another sequence too, gets a stream of its own.
        high, low = self._states[0]
        _set_state((high ^ 0x9E3779B9, low))

    def end(self, covered: int) -> None:
        """Leave the caller's stream where plain generation leaves it. covered: number of tokens, prompt and text."""
        if not self._states:
            return
        # Plain generation has by then rolled one token more.
        num_emitted = covered - self._at - 1
        state = self._states[num_emitted] if num_emitted < len(self._states) else self._states[-1]
        _set_state(state)
        for _ in range(self._draws):
            mx.random.uniform()

    @contextmanager
    def _stream(self) -> Iterator[None]:
        caller = _state()
        _set_state(self._states[-1])
        try:
            yield
        finally:
            _set_state(caller)

    def roll(self, logits: mx.array, drafts: mx.array, at: int = 0) -> Roll:
        """Roll the target's token for each row of a block, up to the first that refuses its draft.

        logits: (γ + 1, V), the target's. drafts: (γ,) ids. at: number of tokens before the block.
        """
        if self._is_greedy and not self.processors:
            roll = _roll_greedily(logits, drafts)
            self._at = at
            return roll
        drafted = read_ids(drafts)
        roll = Roll([], [])
        states = self._states[-1:]
        with self._stream():
            for i in range(len(drafted) + 1):
                token, logprobs = self._roll_row(logits[i : i + 1])
                roll.tokens.append(token)
                roll.logprobs.append(logprobs)
                states.append(_state())
                if i < len(drafted) and token != drafted[i]:
                    break
            self._draws = self._draws or _count_draws(states[0], states[1])
        self._states, self._at = states, at
        return roll

    def _roll_row(self, logits: mx.array) -> tuple[int, mx.array]:
        for processor in self.processors:
            logits = processor(self._history, logits)
        logprobs = log_softmax(logits)
        sampled = self.sampler(logprobs)
        if self.processors:
            self._history = mx.concatenate([self._history, sampled.reshape(1)])
        return read_id(sampled), logprobs.squeeze(0)

    def guess(self, logits: mx.array, ids: mx.array | None = None, vocab_size: int | None = None) -> mx.array:
        """Take draft tokens (γ,) uint32 from the draft's logits as the dice will fall for the target.

        logits: (γ, V), or (γ, n) over the tokens ids (n,) of a vocabulary of vocab_size.
        """
        if not self._can_guess:
            columns = mx.argmax(logits, axis=-1)
            return (columns if ids is None else ids[columns]).astype(mx.uint32)
        with self.guessing(vocab_size) as choose:
            return mx.concatenate([choose(row, ids) for row in mx.split(logits, len(logits))])

    @contextmanager
    def guessing(self, vocab_size: int | None = None) -> Iterator[Callable[..., mx.array]]:
        """Give a function that takes draft tokens one after the other, for those that depend on the one before.

        It maps logits (1, n) of the tokens ids (n,) to a token (1,) uint32; ids may be None if n is the vocabulary.
        """

        def choose(logits: mx.array, ids: mx.array | None = None) -> mx.array:
            if not self._can_guess:
                return self.guess(logits, ids)
            if ids is not None and vocab_size is not None:
                # The random numbers belong to tokens, so each token must stand where it does in the target's row.
                full = mx.full((1, vocab_size), -mx.inf, logits.dtype)
                full[:, ids] = logits
                logits = full
            sampler = self.sampler if self._is_pure else mx.random.categorical
            return sampler(log_softmax(logits * SHARPNESS)).astype(mx.uint32)

        if not self._can_guess:
            yield choose
        else:
            with self._stream():
                yield choose

    @property
    def _can_guess(self) -> bool:
        """Whether it is known how the dice will fall."""
        return not self._is_greedy and (self._is_pure or self._draws > 0)


def _roll_greedily(logits: mx.array, drafts: mx.array) -> Roll:
    """Roll all rows of logits (γ + 1, V) at once. The log-probabilities stay unevaluated until somebody reads them.

    Plain generation takes the greatest log-probability. It is that of the greatest logit, unless rounding makes
    log-probabilities equal whose logits are not; only then are they needed, and they cost as much as many layers.
    """
    logprobs = [log_softmax(logits[i : i + 1]).squeeze(0) for i in range(len(logits))]
    if logits.dtype == mx.float32:
        top = mx.max(logits, axis=-1, keepdims=True)
        # |log-probability of the top| <= log V, and its logsumexp lies within log V of the top.
        step = mx.finfo(mx.float32).eps * (mx.abs(top) + math.log(logits.shape[-1]))
        num_close = mx.sum(logits >= top - 2 * step, axis=-1)
        tokens = mx.argmax(logits, axis=-1)
        mx.eval(tokens, num_close, drafts)
        if mx.max(num_close).item() == 1:
            return Roll(read_ids(tokens), logprobs)
    tokens = mx.argmax(mx.stack(logprobs), axis=-1)
    mx.eval(tokens, drafts)
    return Roll(read_ids(tokens), logprobs)


def _state() -> tuple[int, int]:
    """The random state of this thread."""
    high, low = read_ids(cast(list[mx.array], mx.random.state)[0])
    return high, low


def _set_state(state: tuple[int, int]) -> None:
    mx.random.seed((state[0] << 32) | state[1])


def _count_draws(before: tuple[int, int], after: tuple[int, int]) -> int:
    """Number of random draws that lead from one state to the other; 0 if a few do not."""
    _set_state(before)
    for draws in range(1, 9):
        if before == after:
            break
        mx.random.uniform()
        if _state() == after:
            return draws
    return 0
