"""A run of training: the pair, its lessons, the loop with its checkpoints and validations, and the drafts it writes.

Knows options, folders and machines; knows nothing of flags or of what is printed.
Source: DFlash, block diffusion for flash speculative decoding (z-lab), for the task; the recipe is our own.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from tqdm import tqdm

from ..checkpoints.targets import load
from ..models.structure import Structure
from ..pair import Pair, head_rows
from .export import save_draft
from .folder import RunFolder
from .lessons import FreshLessons, Lesson, Lessons, Teacher
from .loss import Columns
from .options import FitOptions
from .replay import replay
from .samples import order_of_visit, read_material, stored_lessons
from .starting_draft import Source, starting_draft
from .trainer import Head, Trainer

Bar = Callable[[int, str, str], Any]  # total, description and unit to a progress bar, as tqdm's


def fit(options: FitOptions, bar: Bar | None = None) -> list[Path]:
    """Train a draft, or go on where a run with these options was interrupted; return the folders of its drafts.

    bar: makes a progress bar, as a context manager, from a total, a description and a unit; None shows none.
    Raises ValueError for options or files that do not fit, or a folder that was begun with other options.
    """
    with Fit(options) as run:
        run.train(bar or _no_bar)
        return run.run.drafts()


def _no_bar(total: int, description: str, unit: str) -> Any:
    return tqdm(total=total, desc=description, unit=unit, disable=True)


class Fit:
    """A training run, in the state of its last checkpoint if there is one; a context manager that lets its folder go.

    group: the machines that share the work; None for those that mlx.launch has started, or else this one.
    Raises ValueError for options that cannot be followed, before a folder is begun.
    """

    def __init__(self, options: FitOptions, group: Any = None):
        self.options, self.group = options, mx.distributed.init() if group is None else group
        model, tokenizer = load(options.model, tokenizer_config={"trust_remote_code": options.trust_remote_code})
        self.structure = Structure(model)
        self._read_material()
        self.source = Source(model, tokenizer, self.structure, self.counts)
        self.starting = starting_draft(options, self.source)
        self.draft = self.starting.model(Path(options.init_draft or options.out))
        Pair(model, self.draft)
        self.teacher = Teacher(model, self.structure, self.draft.config.target_layer_ids)
        recipe = options.recipe(self.num_learned, self.group.size())
        self.trainer = Trainer(self.draft, self._head(), recipe, options.weighting(), self.group)
        self.step, self.best = 0, 0.0
        self._open_folder()

    def __enter__(self) -> "Fit":
        return self

    def __exit__(self, *error: object) -> None:
        self.run.close()

    @property
    def is_first(self) -> bool:
        """Whether this machine is the one that measures, writes and tells."""
        return self.group.rank() == 0

    def _read_material(self) -> None:
        """Read the text, and take this machine's share of it."""
        options, rank, machines = self.options, self.group.rank(), self.group.size()
        vocab_size = self.structure.vocab_size
        material = read_material(options.data, options.valid_data, options.valid_count, options.max_length, vocab_size)
        self.counts, self.fingerprint = material.counts(vocab_size), material.fingerprint()
        if len(material.learned) < machines:
            raise ValueError(f"{len(material.learned)} samples are too few for {machines} machines")
        self.num_learned, self.num_tokens = len(material.learned), int(self.counts.sum())
        measured = material.measured if self.is_first else []
        self.material = replace(material, learned=material.learned[rank::machines], measured=measured)

    def _head(self) -> Head:
        """Return what the draft borrows, with as many columns as the loss should have."""
        structure, ids, vocab_size = self.structure, self.draft.token_ids, self.structure.vocab_size
        if self.options.loss_vocab is None:
            columns = Columns(None if ids is None else np.array(ids), vocab_size)
            return Head(structure.embed, structure.unembed, columns)
        if ids is not None or "lm_head" in self.draft:
            raise ValueError("--loss-vocab needs a draft that borrows the target's whole head")
        frequent = self.source.frequent(self.options.loss_vocab).astype(np.uint32)
        return Head(structure.embed, head_rows(structure, mx.array(frequent)), Columns(frequent, vocab_size))

    # The folder.

    def _open_folder(self) -> None:
        """Begin the folder of the run, now that nothing is left to refuse, or go on from the last checkpoint in it."""
        facts = {"fingerprint of the text": self.fingerprint, "machines": self.group.size()}
        self.run = RunFolder(self.options.out, self.options.settings() | facts, is_writer=self.is_first)
        try:
            self._resume()
        except ValueError:
            self.run.close()
            raise

    def _resume(self) -> None:
        """Take the state of the last checkpoint, if any. Raises ValueError if the machines found different ones."""
        found = self.run.load()
        if found is not None:
            state, counters = found
            self._take(state, counters["step"])
            self.step, self.best = counters["step"], counters["best"]
        if self.trainer.shared(mx.array(self.step)).item() != self.step * self.group.size():
            raise ValueError(
                f"this machine found a checkpoint of update {self.step} in {self.options.out}, others another one; "
                "all need the same folder"
            )
        self.run.forget_after(None if found is None else self.step)

    def _take(self, state: dict[str, mx.array], step: int) -> None:
        """Bring the trainer to a state, that after `step` updates."""
        if step > self.trainer.recipe.steps:
            raise ValueError(f"{self.options.out} has a checkpoint of update {step}, of {self.trainer.recipe.steps}")
        try:
            self.trainer.resume(state, step)
        except ValueError as error:
            raise ValueError(f"the state in {self.options.out}/checkpoint/state.safetensors: {error}") from error

    def _note(self, **line: Any) -> None:
        if self.is_first:
            self.run.note({"step": self.step, **line})

    def _save(self) -> None:
        if self.is_first:
            self.run.save(self.trainer.state(), {"step": self.step, "best": self.best})

    # The loop.

    def train(self, bar: Bar) -> None:
        """Make the updates that are missing, with checkpoints and validations between them."""
        learned, measured = self._lessons(bar)
        options, recipe = self.options, self.trainer.recipe
        if self.step == 0:
            self._validate(measured)
        tally = _Tally(recipe.anchors)
        with bar(recipe.steps, "training", "update") as shown:
            shown.update(self.step)
            while self.step < recipe.steps:
                chosen = order_of_visit(len(self.material.learned), self.step, recipe.batch_size, recipe.seed)
                lessons = [learned.lesson(i) for i in chosen]
                loss = self.trainer.step(self.step, lessons)
                self.step += 1
                tally.add(loss, lessons)
                shown.update()
                shown.set_postfix_str(f"loss {loss:.3f}, {self.best:.2f} tokens a round")
                is_last = self.step == recipe.steps
                is_saved = self.step % options.save_every == 0 or is_last
                if is_saved:
                    self._note(**tally.line())
                    tally = _Tally(recipe.anchors)
                    mx.clear_cache()
                if self.step % options.valid_every == 0 or is_last:
                    paused = time.perf_counter()
                    self._validate(measured)
                    tally.began += time.perf_counter() - paused
                if is_saved:
                    self._save()

    def _lessons(self, bar: Bar) -> tuple[Lessons, Lessons]:
        """Lessons to learn from and to be measured on."""
        material = self.material
        if self.options.features == "recompute":
            return FreshLessons(self.teacher, material.learned), FreshLessons(self.teacher, material.measured)
        name = f"lessons-{self.group.rank()}" if self.group.size() > 1 else "lessons"
        dtype = self.options.feature_dtype or "bfloat16"
        total = len(material.learned) + len(material.measured)
        with bar(total, "reading with the target", "sample") as shown:

            def progress(done: int) -> None:
                shown.update(done - shown.n)

            return stored_lessons(self.run.path / name, self.teacher, material, dtype, progress)

    def _validate(self, measured: Lessons) -> None:
        """Measure the acceptance on text that was not learned; keep the draft if it is the best so far."""
        if not self.is_first:
            return
        facts, names = {}, ["last"]
        if self.material.measured:
            lessons = [measured.lesson(i) for i in range(len(self.material.measured))]
            stats = replay(self.draft, self.structure, lessons, self.options.valid_tokens)
            self._note(acceptance_length=stats.acceptance_length, histogram=stats.accepted)
            told = f"{stats.acceptance_length:.2f} (greedy, {len(lessons)} held-out answers)"
            facts = {"tokens per target pass": told}
            if stats.acceptance_length > self.best:
                self.best, names = stats.acceptance_length, ["best", "last"]
        facts = self._facts() | facts
        for name in names:
            save_draft(self.run.path / name, self.draft, self.starting.config, facts, self.options.save_dtype)

    def _facts(self) -> dict[str, Any]:
        return {
            "target": self.options.model,
            "trained on": f"{self.num_tokens} tokens of answers, {self.step} updates",
            "first weights": self.starting.origin,
        }


class _Tally:
    """Counts since the last line of the log. anchors: blocks of a sample, at most."""

    def __init__(self, anchors: int):
        self.anchors, self.began = anchors, time.perf_counter()
        self.tokens, self.blocks, self.losses = 0, 0, []

    def add(self, loss: float, lessons: Sequence[Lesson]) -> None:
        """Count an update."""
        self.losses.append(loss)
        self.tokens += sum(lesson.tokens.size for lesson in lessons)
        self.blocks += sum(min(self.anchors, lesson.num_anchors) for lesson in lessons)

    def line(self) -> dict[str, float]:
        """Return the mean loss and the speed, per second."""
        seconds = time.perf_counter() - self.began
        return {
            "loss": float(np.mean(self.losses)),
            "tokens_per_second": self.tokens / seconds,
            "blocks_per_second": self.blocks / seconds,
        }
