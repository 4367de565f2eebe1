"""A run of training: the pair, its lessons, the loop with its checkpoints and validations, and the drafts it writes.

Source: DFlash, block diffusion for flash speculative decoding (z-lab), for the task; the recipe is our own.
"""

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from ..checkpoints.drafts import build_draft, fetch_draft, read_draft
from ..checkpoints.packing import unpacked
from ..checkpoints.targets import load
from ..checkpoints.vocabulary import frequent, special_tokens
from ..draft.model import DraftModel
from ..models.structure import Structure
from ..pair import Pair, head_rows
from .export import save_draft
from .folder import RunFolder
from .lessons import Teacher
from .loss import Columns
from .new_draft import SIZES, draft_config, initialize
from .options import FitOptions
from .replay import replay
from .samples import FreshLessons, order_of_visit, read_material, stored_lessons, unused_token
from .trainer import Head, Trainer

Bar = Callable[[int, str, str], Any]


def fit(options: FitOptions, bar: Bar | None = None) -> list[Path]:
    """Train a draft, or go on where a run with these options was interrupted; return the folders of its drafts.

    bar: makes a progress bar, as a context manager, from a total, a description and a unit; None shows none.
    Raises ValueError for options or files that do not fit, or a folder that was begun with other options.
    """
    with Fit(options) as run:
        run.train(bar or _no_bar)
        return run.run.drafts()


def _no_bar(total: int, description: str, unit: str) -> Any:
    from tqdm import tqdm

    return tqdm(total=total, desc=description, unit=unit, disable=True)


class Fit:
    """A training run, in the state of its last checkpoint if there is one; a context manager that lets its folder go.

    group: the machines that share the work; None for those that mlx.launch has started, or else this one.
    """

    def __init__(self, options: FitOptions, group: Any = None):
        self.options, self.group = options, mx.distributed.init() if group is None else group
        group = self.group
        self.model, self.tokenizer = load(
            options.model, tokenizer_config={"trust_remote_code": options.trust_remote_code}
        )
        self.structure = Structure(self.model)
        material = read_material(
            options.data, options.valid_data, options.valid_count, options.max_length, self.structure.vocab_size
        )
        self.counts = material.counts(self.structure.vocab_size)
        rank, machines = group.rank(), group.size()
        if len(material.learned) < machines:
            raise ValueError(f"{len(material.learned)} samples are too few for {machines} machines")
        self.num_learned, self.num_tokens = len(material.learned), int(self.counts.sum())
        # The first machine alone is the one that measures.
        self.material = replace(
            material, learned=material.learned[rank::machines], measured=material.measured if rank == 0 else []
        )
        self.config, self.draft, self.origin = self._draft()
        Pair(self.model, self.draft)
        self.teacher = Teacher(self.model, self.structure, self.draft.config.target_layer_ids)
        recipe = options.recipe(self.num_learned, machines)
        self.trainer = Trainer(self.draft, self._head(), recipe, options.weighting(), group)
        # Only now, when nothing is left to refuse, is a folder begun.
        settings = options.settings() | {"fingerprint of the text": material.fingerprint(), "machines": machines}
        self.run = RunFolder(options.out, settings, is_writer=rank == 0)
        self.step, self.best = self._restored()

    def __enter__(self) -> "Fit":
        return self

    def __exit__(self, *error: object) -> None:
        self.run.close()

    # The draft.

    def _draft(self) -> tuple[dict[str, Any], DraftModel, str]:
        """The config, the model in float32, and where its weights come from, in words."""
        options = self.options
        if options.init_draft:
            if options.size:
                raise ValueError("--size makes a new draft, --init-draft goes on with one: give one of them")
            config, weights, origin = *self._given_draft(), f"the draft {options.init_draft}"
        else:
            size = SIZES[options.size or "small"]
            config = draft_config(
                self.structure, getattr(self.model, "args", None), size, unused_token(self.counts, self.tokenizer)
            )
            weights, origin = None, ""
        if options.block_size is not None:
            config = _with(config, block_size=options.block_size)
        if weights is None:
            weights, origin = self._first_weights(config)
        if options.draft_vocab is not None:
            config, weights = self._reduced(config, weights)
        return config, build_draft(config, weights, Path(options.init_draft or options.out)), origin

    def _given_draft(self) -> tuple[dict[str, Any], dict[str, mx.array]]:
        path = fetch_draft(self.options.init_draft)
        config, weights = read_draft(path)
        draft = build_draft(config, weights, path)
        if draft.config.version != 1:
            raise ValueError(f"{path} is a DFlash 2 draft; only DFlash 1 drafts can be trained")
        if draft.config.quantization:
            draft = unpacked(draft)
        config = {key: value for key, value in config.items() if key not in ("quantization", "quantization_config")}
        return config, _floats(draft)

    def _first_weights(self, config: dict[str, Any]) -> tuple[dict[str, mx.array], str]:
        from ..draft.config import DraftConfig

        draft = DraftModel(DraftConfig.from_dict(config))
        sources = initialize(draft, self.structure, self.options.seed)
        told = ", ".join("random" if i is None else str(i) for i in sources)
        return _floats(draft), f"target layers {told}"

    def _reduced(
        self, config: dict[str, Any], weights: dict[str, mx.array]
    ) -> tuple[dict[str, Any], dict[str, mx.array]]:
        if "d2t" in weights or "lm_head.weight" in weights:
            raise ValueError("--draft-vocab needs a draft that borrows the target's whole head")
        ids = frequent(self.counts, self.options.draft_vocab, special_tokens(self.tokenizer))
        d2t = mx.array((ids - np.arange(len(ids))).astype(np.int32))
        return _with(config, draft_vocab_size=len(ids)), weights | {"d2t": d2t}

    def _head(self) -> Head:
        """What the draft borrows, with as many columns as the loss shall have."""
        structure, vocab_size = self.structure, self.structure.vocab_size
        ids = self.draft.token_ids
        if self.options.loss_vocab is not None:
            if ids is not None or "lm_head" in self.draft:
                raise ValueError("--loss-vocab needs a draft that borrows the target's whole head")
            ids = mx.array(
                frequent(self.counts, self.options.loss_vocab, special_tokens(self.tokenizer)).astype(np.uint32)
            )
            return Head(structure.embed, head_rows(structure, ids), Columns(np.array(ids), vocab_size))
        return Head(structure.embed, structure.unembed, Columns(None if ids is None else np.array(ids), vocab_size))

    # The loop.

    def _restored(self) -> tuple[int, float]:
        """Bring the trainer to the last checkpoint; return its update and the best acceptance length so far."""
        found = self.run.load()
        step, best = (found[1]["step"], found[1]["best"]) if found is not None else (0, 0.0)
        if found is not None:
            self.trainer.resume(found[0])
        if self.trainer.shared(mx.array(step)).item() != step * self.group.size():
            raise ValueError(
                f"this machine found a checkpoint of update {step} in {self.options.out}, others another one; "
                "all need the same folder"
            )
        return step, best

    def train(self, bar: Bar) -> None:
        """Make the updates that are missing, with checkpoints and validations between them."""
        learned, measured = self._lessons(bar)
        options, trainer, recipe = self.options, self.trainer, self.trainer.recipe
        if self.step == 0:
            self._validate(measured)
        tokens, blocks, began, losses = 0, 0, time.perf_counter(), []
        with bar(recipe.steps, "training", "update") as shown:
            shown.update(self.step)
            while self.step < recipe.steps:
                chosen = order_of_visit(len(self.material.learned), self.step, recipe.batch_size, recipe.seed)
                lessons = [learned.lesson(i) for i in chosen]
                losses.append(trainer.step(self.step, lessons))
                self.step += 1
                tokens += sum(lesson.tokens.size for lesson in lessons)
                blocks += sum(min(recipe.anchors, lesson.num_anchors) for lesson in lessons)
                shown.update()
                shown.set_postfix_str(f"loss {losses[-1]:.3f}, {self.best:.2f} tokens a round")
                is_last = self.step == recipe.steps
                if self.step % options.save_every == 0 or is_last:
                    seconds = time.perf_counter() - began
                    self._note(
                        loss=float(np.mean(losses)),
                        tokens_per_second=tokens / seconds,
                        blocks_per_second=blocks / seconds,
                    )
                    tokens, blocks, began, losses = 0, 0, time.perf_counter(), []
                    mx.clear_cache()
                if self.step % options.valid_every == 0 or is_last:
                    paused = time.perf_counter()
                    self._validate(measured)
                    began += time.perf_counter() - paused
                if self.step % options.save_every == 0 or is_last:
                    self._save()

    def _lessons(self, bar: Bar) -> tuple[Any, Any]:
        if self.options.features == "recompute":
            return tuple(
                FreshLessons(self.teacher, samples) for samples in (self.material.learned, self.material.measured)
            )
        name = f"lessons-{self.group.rank()}" if self.group.size() > 1 else "lessons"
        with bar(
            len(self.material.learned) + len(self.material.measured), "reading with the target", "sample"
        ) as shown:
            dtype = self.options.feature_dtype or "bfloat16"
            return stored_lessons(
                self.run.path / name, self.teacher, self.material, dtype, lambda done: shown.update(done - shown.n)
            )

    def _validate(self, measured: Any) -> None:
        """Measure the acceptance on text that was not learned; keep the draft if it is the best so far."""
        if self.group.rank() != 0:
            return
        facts, names = {}, ["last"]
        if self.material.measured:
            lessons = [measured.lesson(i) for i in range(len(self.material.measured))]
            stats = replay(self.draft, self.structure, lessons, self.options.valid_tokens)
            self._note(acceptance_length=stats.acceptance_length, histogram=stats.accepted)
            facts = {
                "tokens per target pass": f"{stats.acceptance_length:.2f} (greedy, {len(lessons)} held-out answers)"
            }
            if stats.acceptance_length > self.best:
                self.best, names = stats.acceptance_length, ["best", "last"]
        for name in names:
            save_draft(self.run.path / name, self.draft, self.config, self._facts() | facts, self.options.save_dtype)

    def _facts(self) -> dict[str, Any]:
        return {
            "target": self.options.model,
            "trained on": f"{self.num_tokens} tokens of answers, {self.step} updates",
            "first weights": self.origin,
        }

    def _note(self, **line: Any) -> None:
        if self.group.rank() == 0:
            self.run.note({"step": self.step, **line})

    def _save(self) -> None:
        if self.group.rank() == 0:
            self.run.save(self.trainer.state(), {"step": self.step, "best": self.best})


def _with(config: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """A config.json with other values, also where nested ones would win."""
    nested = {key: value for key, value in config["dflash_config"].items() if key not in changes}
    return {**config, **changes, "dflash_config": nested}


def _floats(draft: DraftModel) -> dict[str, mx.array]:
    """The weights of a draft, in float32 where they are floating."""
    from mlx.utils import tree_flatten

    return {
        k: v.astype(mx.float32) if mx.issubdtype(v.dtype, mx.floating) else v
        for k, v in tree_flatten(draft.parameters())
    }
