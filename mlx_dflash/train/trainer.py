"""One update after the other: gradients of the loss over many blocks, and AdamW.

Knows the draft, its lessons and mx.distributed; knows nothing of files.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.optimizers as optim
import numpy as np
from mlx.utils import tree_flatten, tree_map, tree_unflatten

from ..dice import Dice
from ..draft.model import DraftModel
from ..drafter import Drafter
from .forward import block_logits
from .lessons import Lesson
from .loss import Columns, Weighting, block_loss, slot_weights

_FINAL_SHARE = 0.1  # of the learning rate, at the last update


@dataclass(frozen=True)
class Recipe:
    """The recipe of a fit.

    steps: updates in all. batch_size: samples of an update, on each machine. anchors: blocks of a sample. block_sizes:
    taken in turn by the updates, none for the draft's own. dtype: of the computation; the weights are float32.
    checkpointed: compute layers twice to save memory.
    """

    steps: int
    batch_size: int = 4
    anchors: int = 32
    block_sizes: tuple[int, ...] = ()
    learning_rate: float = 6e-4
    warmup: int = 0
    weight_decay: float = 0.01
    clip: float = 1.0
    seed: int = 0
    dtype: str = "float32"
    checkpointed: bool = False

    def __post_init__(self):
        for name in ("steps", "batch_size", "anchors"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be 1 or more, got {getattr(self, name)}")
        for name in ("learning_rate", "clip"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be above 0, got {getattr(self, name)}")
        if not 0 <= self.warmup < self.steps:
            raise ValueError(f"warmup must be 0 to {self.steps - 1}, all updates but one; got {self.warmup}")
        if self.weight_decay < 0:
            raise ValueError(f"weight_decay must not be negative, got {self.weight_decay}")

    def schedule(self) -> Callable[[mx.array], mx.array]:
        """Learning rate by update: a line up, then a cosine down."""
        fall = optim.cosine_decay(self.learning_rate, self.steps - self.warmup, _FINAL_SHARE * self.learning_rate)
        if self.warmup == 0:
            return fall
        rise = optim.linear_schedule(self.learning_rate / (self.warmup + 1), self.learning_rate, self.warmup)
        return optim.join_schedules([rise, fall], [self.warmup])


@dataclass(frozen=True)
class Head:
    """The frozen parts that a draft borrows: embed (B, T) to (B, T, H), unembed (..., H) to logits of its columns."""

    embed: Callable[[mx.array], mx.array]
    unembed: Callable[[mx.array], mx.array]
    columns: Columns


class Trainer:
    """Fits a draft. group: the machines that share the work, each with lessons of its own."""

    def __init__(self, draft: DraftModel, head: Head, recipe: Recipe, weighting: Weighting, group: Any = None):
        self.draft, self.head, self.recipe, self.weighting = draft, head, recipe, weighting
        self.group = group
        draft.freeze(recurse=False, keys=["d2t"], strict=False)
        self.optimizer = optim.AdamW(learning_rate=recipe.schedule(), weight_decay=recipe.weight_decay)
        self.optimizer.init(draft.trainable_parameters())
        self._block_sizes = recipe.block_sizes or (draft.config.num_drafts + 1,)
        if not all(2 <= size <= draft.config.num_drafts + 1 for size in self._block_sizes):
            raise ValueError(
                f"blocks must have 2 to {draft.config.num_drafts + 1} tokens, got {list(self._block_sizes)}"
            )
        self._dtype = getattr(mx, recipe.dtype)
        self._gradient = mx.value_and_grad(self._loss)

    def anchors(self, step: int, place: int, lesson: Lesson) -> mx.array:
        """Choose positions (A,) of an answer at random, the same ones whenever this update is made."""
        random = np.random.default_rng((self.recipe.seed, step, place))
        chosen = random.permutation(lesson.num_anchors)[: self.recipe.anchors]
        return mx.array(lesson.prompt_length + np.sort(chosen).astype(np.int32))

    def step(self, number: int, lessons: Sequence[Lesson]) -> float:
        """Make update `number` (from 0) with this machine's lessons; return the mean loss of all machines' slots."""
        picks = [(lesson, self.anchors(number, i, lesson)) for i, lesson in enumerate(lessons)]
        slots = mx.array(self.weighting.slots(self._block_sizes[number % len(self._block_sizes)] - 1))
        weights = [slot_weights(*pick, self.head.columns, slots) for pick in picks]
        # Where the head has none of the tokens, nothing is learned.
        total = mx.maximum(self.shared(sum(w.sum() for w in weights)), 1e-9)
        loss, gradients = self._sum_of_gradients(list(zip(picks, weights)), total)
        gradients, norm = optim.clip_grad_norm(tree_map(self.shared, gradients), self.recipe.clip)
        loss, norm = self.shared(loss).item(), norm.item()
        if not np.isfinite([loss, norm]).all():
            raise ValueError(
                f"update {number} has the loss {loss} and a gradient of norm {norm}; "
                "a lower --learning-rate and another --out may help"
            )
        self.optimizer.update(self.draft, gradients)
        mx.eval(self.draft.parameters(), self.optimizer.state)
        return loss

    def _sum_of_gradients(self, work: list, total: mx.array) -> tuple[mx.array, Any]:
        loss, gradients = mx.zeros(()), None
        masters = self.draft.trainable_parameters()
        try:
            for (lesson, anchors), weights in work:
                part, slopes = self._gradient(masters, lesson, anchors, weights / total)
                gradients = slopes if gradients is None else tree_map(mx.add, gradients, slopes)
                loss = loss + part
                mx.eval(loss, gradients)
        finally:
            self.draft.update(masters)
        return loss, gradients

    def _loss(self, parameters: Any, lesson: Lesson, anchors: mx.array, weights: mx.array) -> mx.array:
        self.draft.update(tree_map(lambda p: p.astype(self._dtype), parameters))
        drafter = Drafter(self.draft, self.head.embed, self.head.unembed, Dice(), block_size=weights.shape[1] + 1)
        logits = block_logits(drafter, lesson.features, anchors, lesson.tokens[anchors], self.recipe.checkpointed)
        return block_loss(logits, lesson, anchors, self.head.columns, (weights, self.weighting.soft))

    def shared(self, x: mx.array) -> mx.array:
        """The sum over all machines."""
        return x if self.group is None or self.group.size() == 1 else mx.distributed.all_sum(x, group=self.group)

    # What a checkpoint holds.

    def state(self) -> dict[str, mx.array]:
        """Return the weights and the optimizer's state, by name."""
        weights = {f"draft.{k}": v for k, v in tree_flatten(self.draft.trainable_parameters())}
        return weights | {f"optimizer.{k}": v for k, v in tree_flatten(self.optimizer.state)}

    def resume(self, state: dict[str, mx.array], step: int) -> None:
        """Go back to a state, that after `step` updates. Raises ValueError that names a tensor for any other."""
        _check_state(state, self.state())
        if (found := state["optimizer.step"].item()) != step:
            raise ValueError(f"optimizer.step is {found}, expected {step}, the updates that were made")

        def part(name: str) -> Any:
            return tree_unflatten([(k.partition(".")[2], v) for k, v in state.items() if k.startswith(f"{name}.")])

        self.draft.update(part("draft"))
        self.optimizer.state = part("optimizer")
        mx.eval(self.draft.parameters(), self.optimizer.state)


def _check_state(state: dict[str, mx.array], expected: dict[str, mx.array]) -> None:
    """Raise ValueError unless the names, shapes and types agree and the numbers are such as training makes."""
    if missing := sorted(expected.keys() - state.keys()):
        raise ValueError(f"{len(missing)} tensors are missing, among them {missing[0]}")
    if unknown := sorted(state.keys() - expected.keys()):
        raise ValueError(f"{len(unknown)} tensors are not part of this run, among them {unknown[0]}")
    for name, wanted in expected.items():
        found = state[name]
        if found.shape != wanted.shape or found.dtype != wanted.dtype:
            raise ValueError(f"{name} holds {found.dtype} {found.shape}, expected {wanted.dtype} {wanted.shape}")
        if not mx.isfinite(found).all().item():
            raise ValueError(f"{name} holds numbers that are not finite")
        if name.startswith("optimizer.") and not name.endswith(".m") and (found < 0).any().item():
            raise ValueError(f"{name} holds negative numbers, which AdamW never makes")
