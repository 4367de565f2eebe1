"""A frozen mlx-lm model as the target of one sequence: prefill, verify, commit.

Taps, kernels and recorders come and go with each pass. Knows mlx-lm's models and caches, with structure.py and
rollback.py; knows nothing of drafts.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

from .caches import rollback
from .caches.quantization import KVQuantization
from .caches.recurrences import Recurrences
from .kernels import Kernels
from .models.structure import (
    Structure,
    by_kernels,
    check_layer_ids,
    features_of,
    quantized_linears,
    shared_rotations,
    tapped,
)

_PROBE = 4  # tokens
_PROBE_TOLERANCE = 0.1  # of the spread of the logits; rounding, also of quantized models, stays far below
_GPU_TOLERANCE = 1e-3  # the same, of the same pass twice: a GPU may add in another order, the CPU does not


@dataclass(frozen=True)
class Scores:
    """One verify: logits (γ + 1, V) of the anchor's and the drafts' rows, context features (1, γ + 1, T * D)."""

    logits: mx.array
    features: mx.array


class Target:
    """A model seen by one sequence.

    target_layer_ids: layers whose outputs are the context features, in that order. caches: the model's prompt cache,
    and whatever stands behind it in the same list; its entries are replaced, in place, by ones that can roll back.
    block_size: most rows of a verify. kernels: may run a verify's attention and quantized products; without them,
    stock MLX operations do. structure: the model's, if it is known. quantization: of the rows that the caches keep.
    length: number of tokens that the caches cover, for caches that do not know it.
    Between calls the caches cover the committed tokens, except some that may wait in front of the next verify.
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
    ):
        self.model = model
        self.kernels = kernels or Kernels("off")
        self._linears: list[tuple[nn.Module, str, nn.QuantizedLinear]] | None = None
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
        self._block_size = block_size
        self._length = max(rollback.lengths(self.caches), default=length)
        self._waiting = mx.zeros((0,), mx.uint32)  # committed tokens that the caches do not cover yet
        self._pass: _Pass | None = None
        self._start: rollback.Checkpoint | None = None  # before the latest prefill

    @property
    def length(self) -> int:
        """Number of committed tokens."""
        return self._length

    @property
    def way_back(self) -> str:
        """How refused tokens leave the caches: "rows" are cut, a "recurrence" or, by "replay", the model runs again."""
        if not rollback.Checkpoint(self.caches, 0).recurrent:
            return "rows"
        return "recurrence" if self._recurrences.works else "replay"

    def reserve(self, tokens: int) -> None:
        """Make room for this many tokens in all at the next growth."""
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

        progress is called with the number of tokens processed so far. No logits are computed.
        """
        if self._waiting.size:
            self.settle()
        self._pass = None
        self._start = rollback.Checkpoint(self.caches, self._length, with_windows=True)
        rollback.set_stepwise(self.caches, False)
        try:
            for start in range(0, tokens.size, step_size):
                chunk = tokens[start : start + step_size]
                _, features = self._run([chunk], rollback.Checkpoint(self.caches, self._length, with_windows=True))
                self._length += chunk.size
                on_features(features)
                mx.eval(features, [cache.state for cache in self.caches])
                progress(start + chunk.size)
                mx.clear_cache()
        finally:
            rollback.set_stepwise(self.caches, True)

    def verify(self, anchor: int | mx.array, drafts: mx.array) -> Scores:
        """Run the target over [anchor, drafts]: one pass, γ + 1 rows, uncommitted until commit. drafts: (γ,) ids."""
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
        """Keep the first num_rows rows of the verified block, forget the rest.

        May be called again, with fewer rows, until the next verify.
        """
        latest = self._pass
        assert 0 <= num_rows <= self._length - latest.first, (
            f"commit of {num_rows} of {self._length - latest.first} rows"
        )
        if latest.first + num_rows < self._length:
            self._length = latest.first + num_rows
            self._go_back(latest)

    def _go_back(self, latest: "_Pass") -> None:
        """Let the caches keep what self._length says of the latest pass, or wait for it to be put in front of the next."""
        before = latest.before
        kept = self._length - before.length
        if kept and (not before.recurrent or latest.is_whole and self._recurrences.rewind(before.recurrent, kept)):
            if self._quantization is not None and self._length < self._quantization.start:
                before.put_back(self.caches)
            rollback.cut(self.caches, self._length)
            self._waiting = latest.tokens[:0]
        else:
            before.restore(self.caches)
            self._waiting = latest.tokens[:kept]
        self._publish()

    def settle(self) -> None:
        """Let the caches cover all committed tokens, also those that wait for the next verify, and evaluate them."""
        if self._waiting.size:
            before = rollback.Checkpoint(self.caches, self._length - self._waiting.size)
            self._run(self._parts(self._waiting), before)
            self._waiting = self._waiting[:0]
        self._pass = None
        if self._length:
            mx.eval([cache.state for cache in self.caches])

    def can_rewind(self, length: int) -> bool:
        """Whether the caches can go back to covering the first `length` tokens only."""
        if self._start is not None and length == self._start.length:
            return True
        return rollback.can_drop_rows(self.caches, self._length - length)

    def rewind(self, length: int) -> None:
        """Go back to covering the first `length` tokens only: into the latest block, or before the latest prefill."""
        if self._pass is not None and length >= self._pass.first:
            return self.commit(length - self._pass.first)
        if self._start is not None and length == self._start.length:
            self._start.restore(self.caches)
        else:
            rollback.cut(self.caches, length)
        self._publish()
        self._length, self._pass, self._start = length, None, None

    def _parts(self, tokens: mx.array) -> list[mx.array]:
        """Split the tokens (T,) of a verify where the rows kept so far become quantized: one-row steps would do so."""
        covered = self._length - self._waiting.size
        rows = tokens.size
        if self._quantization is not None:
            rows = min(rows, self._quantization.rows_before(self.caches, covered))
        return [part for part in (tokens[:rows], tokens[rows:]) if part.size]

    def _run(self, parts: list[mx.array], before: rollback.Checkpoint) -> tuple[mx.array, mx.array]:
        """Run the model over tokens, in parts. Returns logits (1, T, V) and context features (1, T, taps * D).

        If it raises, the caches are as they were before all parts.
        """
        outputs = []
        try:
            for part in parts:
                recorded = self._recurrences.recorded(bool(before.recurrent))
                with tapped(self.structure, self.target_layer_ids) as taps, recorded, shared_rotations():
                    logits = self.model(part[None], cache=self.caches)
                if not taps and self.structure.calls_layers:
                    self.structure.calls_layers = False
                    before.restore(self.caches)
                    return self._run(parts, before)
                outputs.append((logits, features_of(taps, self.target_layer_ids, part.size, self.model)))
                if self._quantization is not None:
                    self._quantization.apply(self.caches)
        except BaseException:
            before.restore(self.caches)
            raise
        finally:
            self._publish()
        if len(outputs) == 1:
            return outputs[0]
        return tuple(mx.concatenate(pieces, axis=1) for pieces in zip(*outputs))

    def _run_by_kernels(self, parts: list[mx.array], before: rollback.Checkpoint) -> tuple[mx.array, mx.array]:
        """As _run, with kernels where they are chosen, and again without them if the result is not finite."""
        started = time.perf_counter()
        if self._linears is None:
            self._linears = quantized_linears(self.model)
        with by_kernels(self._linears, self.kernels):
            result = self._run(parts, before)
        if self.kernels.distrusts(result[0], started):
            before.restore(self.caches)
            result = self._run(parts, before)
        return result

    def _publish(self) -> None:
        """Show the caller's list the caches that replaced its own."""
        self._shared[: len(self.caches)] = self.caches


@dataclass
class _Pass:
    """A verify. before: the caches before it. tokens: those it ran over. first: number of tokens before its block.

    is_whole: whether it was one call of the model.
    """

    before: rollback.Checkpoint
    tokens: mx.array
    first: int
    is_whole: bool


def probe(model: nn.Module, target_layer_ids: Sequence[int], structure: Structure | None = None) -> int:
    """Check on a few tokens that tapping changes no bit of the logits; return the width of one tap.

    structure: the model's, if it is known; it learns whether the model calls its layers.
    Raises ValueError if it does, on a GPU beyond rounding, if a tapped layer returns no hidden states, or if the model
    computes several tokens at once otherwise than one after the other.
    """
    structure = structure or Structure(model)
    tokens = mx.arange(_PROBE)[None] % structure.vocab_size
    plain = model(tokens, cache=make_prompt_cache(model))
    for structure.calls_layers in (True, False):
        with tapped(structure, target_layer_ids) as outputs:
            observed = model(tokens, cache=make_prompt_cache(model))
        if outputs:
            break
    features = features_of(outputs, target_layer_ids, _PROBE, model)
    is_same = mx.array_equal(plain, observed, equal_nan=True).item()
    plain, observed = (mx.where(mx.isfinite(x), x, 0).astype(mx.float32) for x in (plain, observed))
    spread = (plain.max() - plain.min()).item()
    tolerance = 0 if mx.default_device() == mx.cpu else _GPU_TOLERANCE
    if not is_same and mx.abs(plain - observed).max().item() >= tolerance * spread:
        raise ValueError(f"tapping layers {list(target_layer_ids)} of {type(model).__module__} changes its logits")
    caches = make_prompt_cache(model)
    steps = mx.concatenate([model(tokens[:, i : i + 1], cache=caches) for i in range(_PROBE)], axis=1)
    error = mx.abs(plain - mx.where(mx.isfinite(steps), steps, 0).astype(mx.float32)).max().item()
    if error > _PROBE_TOLERANCE * spread:
        raise ValueError(
            f"{type(model).__module__} of mlx-lm gives other logits for {_PROBE} tokens at once than one by one (off by {error:.2g} "
            f"of {spread:.2g}), so it cannot verify a block"
        )
    return features.shape[-1] // len(target_layer_ids)
