"""A frozen mlx-lm model as the target of one sequence: prefill, verify, commit.

Taps, kernels and recorders are put into the model for each pass and removed after it. Knows mlx-lm's models and
caches, by way of models/ and caches/; knows nothing of drafts.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

from .caches import rollback
from .caches.quantization import KVQuantization
from .caches.recurrences import Recurrences
from .kernels import Kernels
from .models.few_rows import Linears, by_kernels, quantized_linears
from .models.rotations import shared_rotations
from .models.stand_ins import Replacement, standing_in
from .models.structure import Structure, check_layer_ids
from .models.taps import features_of, tapped
from .pace import ReadingPace


@dataclass(frozen=True)
class Scores:
    """One verify: logits (γ + 1, V) of the anchor's and the drafts' rows, context features (1, γ + 1, T * D)."""

    logits: mx.array
    features: mx.array


class Target:
    """A model seen by one sequence.

    target_layer_ids: layers whose outputs are the context features, in that order. caches: the model's prompt cache;
    entries that other owners have appended to it are left alone, those of the model are replaced, in place, by ones
    that can be rewound. block_size: most rows of a verify. kernels: may run a verify's attention and quantized
    products; without them, stock MLX operations do. structure: the model's, if it is known. quantization: of the rows
    that the caches keep. length: number of tokens that the caches cover, for caches that do not count them.
    reading_pace: may make the steps of a prefill shorter, where their borders change nothing that the caches hold.
    Between calls the caches cover the committed tokens. Some of the last ones may be missing; they are kept here and
    run in front of the next verify.
    Raises ValueError for layers the model does not have, and for caches that cannot roll back or be quantized.
    """

    def __init__(
        self,
        model: nn.Module,
        target_layer_ids: Sequence[int],
        caches: list[Any] | None = None,
        block_size: int = 16,
        kernels: Kernels | None = None,
        *,
        structure: Structure | None = None,
        quantization: KVQuantization | None = None,
        length: int = 0,
        reading_pace: ReadingPace | None = None,
    ):
        self.model = model
        self.kernels = kernels or Kernels("off")
        self._linears: Linears | None = None
        self.structure = structure or Structure(model)
        self.target_layer_ids = check_layer_ids(target_layer_ids, len(self.structure.layers))
        own = make_prompt_cache(model)
        self._shared = own if caches is None else caches
        self.caches = self._shared[: len(own)]
        # A block, and the kept tokens in front of it.
        rollback.adopt(self.caches, slack=2 * block_size)
        self._quantization = quantization
        if quantization is not None:
            quantization.check(self.caches)
        self._publish()
        self._recurrences = Recurrences(model)
        self._reading_pace = reading_pace or ReadingPace()
        self._block_size = block_size
        self._length = max(rollback.lengths(self.caches), default=length)
        self._waiting = mx.zeros((0,), mx.uint32)  # committed tokens that the caches do not cover yet
        self._pass: _Pass | None = None
        self._start: rollback.Checkpoint | None = None  # before the latest prefill

    @property
    def length(self) -> int:
        """Number of committed tokens."""
        return self._length

    def reserve(self, tokens: int) -> None:
        """Let the next growth of the caches make room for this many tokens in all."""
        for cache in rollback.leaves(self.caches):
            if hasattr(cache, "reserve"):
                cache.reserve(tokens)

    def prefill(
        self,
        tokens: mx.array,
        on_features: Callable[[mx.array], None],
        step_size: int = 2048,
        progress: Callable[[int], None] = lambda processed: None,
    ) -> None:
        """Commit tokens (T,) chunk by chunk. on_features gets each chunk's context features (1, S, T * D).

        step_size: tokens of a chunk, which the reading pace may cut into several. progress is called with the number of
        tokens processed so far. No logits are computed.
        """
        if self._waiting.size:
            self.settle()
        self._pass = None
        self._start = rollback.Checkpoint(self.caches, self._length, with_windows=True)
        rollback.set_stepwise(self.caches, False)
        try:
            for chunk in self._chunks(tokens, step_size):
                began = time.perf_counter()
                _, features = self._run([chunk], rollback.Checkpoint(self.caches, self._length, with_windows=True))
                self._length += chunk.size
                on_features(features)
                mx.eval(features, [cache.state for cache in self.caches])
                self._reading_pace.learn(chunk.size, time.perf_counter() - began)
                progress(self._length - self._start.length)
                mx.clear_cache()
        finally:
            rollback.set_stepwise(self.caches, True)

    def _chunks(self, tokens: mx.array, step_size: int) -> Iterator[mx.array]:
        """Yield what is read at a time: steps of mlx-lm's size, cut further where no result depends on it."""
        may_cut = self._quantization is None and rollback.can_be_read_in_any_steps(self.caches)
        done = 0
        while done < tokens.size:
            most = step_size - done % step_size
            size = self._reading_pace.step(most) if may_cut else most
            yield tokens[done : done + size]
            done += size

    def verify(self, anchor: int | mx.array, drafts: mx.array) -> Scores:
        """Run the target over [anchor, drafts] in one pass of γ + 1 rows, which commit then keeps. drafts: (γ,) ids."""
        block = mx.concatenate([mx.array(anchor).reshape(1).astype(mx.uint32), drafts])
        if self._waiting.size > self._block_size:
            self.settle()
        tokens = mx.concatenate([self._waiting, block])
        parts = self._parts(tokens)
        before = rollback.Checkpoint(self.caches, self._length - self._waiting.size)
        run = self._run_by_kernels if self.kernels.can_run else self._run
        logits, features = run(parts, before)
        self._pass = _Pass(before, tokens, first=self._length, is_whole=len(parts) == 1)
        self._waiting = tokens[:0]
        self._length += block.size
        return Scores(logits[0, -block.size :], features[:, -block.size :])

    def commit(self, num_rows: int) -> None:
        """Keep the first num_rows rows of the verified block and forget the others.

        It may be called again, with fewer rows, until the next verify.
        """
        latest = self._pass
        assert latest is not None, "commit before the first verify"
        assert 0 <= num_rows <= self._length - latest.first, (
            f"commit of {num_rows} of {self._length - latest.first} rows"
        )
        if latest.first + num_rows < self._length:
            self._length = latest.first + num_rows
            self._keep(latest)

    def _keep(self, latest: "_Pass") -> None:
        """Keep the first `_length` tokens of the latest pass in the caches.

        If some caches can neither be trimmed nor compute their state again, go back to before the pass, and let the
        kept tokens wait for the next verify.
        """
        before = latest.before
        kept = self._length - before.length
        if kept and (not before.recurrent or latest.is_whole and self._recurrences.rewind(before.recurrent, kept)):
            if self._quantization is not None and self._length < self._quantization.start:
                before.put_into(self.caches)
            rollback.trim_to(self.caches, self._length)
            self._waiting = latest.tokens[:0]
        else:
            before.rewind(self.caches)
            self._waiting = latest.tokens[:kept]
        self._publish()

    def settle(self) -> None:
        """Run the tokens that wait for the next verify, so that the caches cover all; evaluate the caches."""
        if self._waiting.size:
            before = rollback.Checkpoint(self.caches, self._length - self._waiting.size)
            self._run(self._parts(self._waiting), before)
            self._waiting = self._waiting[:0]
        self._pass = None
        if self._length:
            mx.eval([cache.state for cache in self.caches])

    def can_rewind(self, length: int) -> bool:
        """Whether the caches can rewind to the first `length` tokens."""
        if self._start is not None and length == self._start.length:
            return True
        return rollback.can_trim(self.caches, self._length - length)

    def rewind(self, length: int) -> None:
        """Rewind to the first `length` tokens: into the latest block, or to where the latest prefill began."""
        if self._pass is not None and length >= self._pass.first:
            return self.commit(length - self._pass.first)
        if self._start is not None and length == self._start.length:
            self._start.rewind(self.caches)
        else:
            rollback.trim_to(self.caches, length)
        self._publish()
        self._length, self._pass, self._start = length, None, None

    def _parts(self, tokens: mx.array) -> list[mx.array]:
        """Split the tokens (T,) of a verify where the caches become quantized, as they would in one-row steps."""
        covered = self._length - self._waiting.size
        rows = tokens.size
        if self._quantization is not None:
            rows = min(rows, self._quantization.rows_before(self.caches, covered))
        return [part for part in (tokens[:rows], tokens[rows:]) if part.size]

    def _run(self, parts: list[mx.array], before: rollback.Checkpoint) -> tuple[mx.array, mx.array]:
        """Run the model over tokens, in parts; return logits (1, T, V) and context features (1, T, taps * D).

        If the model raises, the caches are rewound to `before`.
        """
        outputs = []
        try:
            for part in parts:
                recorders = [Replacement(*r) for r in self._recurrences.recorders(bool(before.recurrent))]
                recorded, rotations = standing_in(recorders), shared_rotations()
                with tapped(self.structure, self.target_layer_ids) as taps, recorded, rotations:
                    logits = self.model(part[None], cache=self.caches)
                if not taps and self.structure.tap_entrances():
                    before.rewind(self.caches)
                    return self._run(parts, before)
                outputs.append((logits, features_of(taps, self.target_layer_ids, part.size, self.model)))
                if self._quantization is not None:
                    self._quantization.apply(self.caches)
        except BaseException:
            before.rewind(self.caches)
            raise
        finally:
            self._publish()
        if len(outputs) == 1:
            return outputs[0]
        logits, features = (mx.concatenate(list(pieces), axis=1) for pieces in zip(*outputs))
        return logits, features

    def _run_by_kernels(self, parts: list[mx.array], before: rollback.Checkpoint) -> tuple[mx.array, mx.array]:
        """Run as _run does, by kernels where they are chosen; run again without them if the result is not finite."""
        started = time.perf_counter()
        if self._linears is None:
            self._linears = quantized_linears(self.model)
        with by_kernels(self._linears, self.kernels):
            result = self._run(parts, before)
        if self.kernels.distrusts(result[0], started):
            before.rewind(self.caches)
            result = self._run(parts, before)
        return result

    def _publish(self) -> None:
        """Show the caller's list the caches that replaced its own."""
        self._shared[: len(self.caches)] = self.caches


@dataclass
class _Pass:
    """The latest verify.

    before: the caches before it. tokens: those that it ran over. first: number of tokens before its block.
    is_whole: whether it was one call of the model.
    """

    before: rollback.Checkpoint
    tokens: mx.array
    first: int
    is_whole: bool
