"""Lessons, from which a draft learns, sample by sample: the target's context features and its likeliest next tokens.

Computed once and kept on disk, since they cost more than a step of training, or computed anew at each visit.
Knows the target's structure; knows nothing of drafts.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from ..files.folders import write_file
from ..files.json_text import read_json
from ..models.probe import probe
from ..models.structure import Structure
from ..models.taps import features_of, tapped
from .text.corpus import Sample

TOP = 8  # tokens of the target's distribution that are kept
_STEP = 512  # tokens of a pass: bounds the logits that exist at a time
_BLOCKS = 256  # the vocabulary is cut into these to find its greatest logits


@dataclass(frozen=True)
class Lesson:
    """One sample as the target sees it.

    tokens: (S,) int32. features: (S, T * D), the tap layers' outputs. top_ids, top_logits: (S, TOP), the target's
    greatest logits for the token after each row.
    """

    tokens: mx.array
    prompt_length: int
    features: mx.array
    top_ids: mx.array
    top_logits: mx.array

    @property
    def num_anchors(self) -> int:
        """Tokens of the answer that another one follows."""
        return self.tokens.size - 1 - self.prompt_length


class Teacher:
    """Makes lessons of samples with the frozen target. width: of the context features, T * D."""

    def __init__(self, model: nn.Module, structure: Structure, target_layer_ids: Sequence[int]):
        self.model, self.structure, self.target_layer_ids = model, structure, tuple(target_layer_ids)
        self.width = len(self.target_layer_ids) * probe(model, target_layer_ids, structure)

    def lesson(self, sample: Sample) -> Lesson:
        """Run the target over a sample."""
        tokens = mx.array(sample.tokens)
        caches = make_prompt_cache(self.model)
        parts = []
        for start in range(0, tokens.size, _STEP):
            part = tokens[start : start + _STEP]
            with tapped(self.structure, self.target_layer_ids) as taps:
                logits = self.model(part[None], cache=caches)[0]
            features = features_of(taps, self.target_layer_ids, part.size, self.model)[0]
            parts.append((features, *_greatest(logits)))
            mx.eval(parts[-1], [cache.state for cache in caches])
        features, ids, values = (mx.concatenate(pieces) for pieces in zip(*parts))
        return Lesson(tokens.astype(mx.int32), sample.prompt_length, features, ids, values)


def _greatest(logits: mx.array) -> tuple[mx.array, mx.array]:
    """Ids and values (S, TOP) of the greatest of the logits (S, V), in no order; searched by blocks, for speed."""
    S, V = logits.shape
    logits = logits.astype(mx.float32)
    width = -(-V // _BLOCKS)
    if V >= TOP * _BLOCKS:
        padded = mx.pad(logits, ((0, 0), (0, width * _BLOCKS - V)), constant_values=-mx.inf).reshape(S, _BLOCKS, width)
        blocks = mx.argpartition(padded.max(axis=-1), -TOP, axis=-1)[:, -TOP:]  # (S, TOP)
        candidates = mx.take_along_axis(padded, blocks[..., None], axis=1).reshape(S, -1)
        found = mx.argpartition(candidates, -TOP, axis=-1)[:, -TOP:]
        ids = mx.take_along_axis(blocks, found // width, axis=-1) * width + found % width
    else:
        ids = mx.argpartition(logits, -min(TOP, V), axis=-1)[:, -min(TOP, V) :]
    return ids.astype(mx.int32), mx.take_along_axis(logits, ids, axis=-1)


class Lessons(Protocol):
    """A sequence of lessons, read or made one by one."""

    def lesson(self, i: int) -> Lesson: ...


class FreshLessons:
    """Lessons that are made anew each time."""

    def __init__(self, teacher: Teacher, samples: Sequence[Sample]):
        self.teacher, self.samples = teacher, samples

    def lesson(self, i: int) -> Lesson:
        """Run the target over sample i."""
        return self.teacher.lesson(self.samples[i])


class LessonStore:
    """Lessons of a list of samples in a folder, in their order; what is missing is made by fill.

    dtype: of the features on disk. description: what the lessons depend on; a folder with another one is refused.
    """

    def __init__(self, folder: Path, samples: Sequence[Sample], dtype: mx.Dtype, width: int, description: dict):
        self.folder, self.samples, self.dtype = folder, samples, dtype
        self._ends = np.cumsum([0, *(len(s.tokens) for s in samples)])
        # MLX's bfloat16 has no numpy type, so the bits are stored.
        self._features = _Rows(folder / "features.bin", np.dtype(f"u{dtype.size}"), width)
        self._ids = _Rows(folder / "top_ids.bin", np.dtype(np.int32), TOP)
        self._logits = _Rows(folder / "top_logits.bin", np.dtype(np.float32), TOP)
        folder.mkdir(parents=True, exist_ok=True)
        about, description = folder / "about.json", {**description, "dtype": str(dtype)}
        if not about.exists():
            write_file(about, json.dumps(description))
        found = read_json(about)
        if found != description:
            raise ValueError(
                f"{folder} holds lessons of {found}, not of {description}; remove it or choose another folder"
            )

    def fill(self, teacher: Teacher, progress: Callable[[int], None]) -> None:
        """Make the lessons that are missing. progress gets the number of those that are there."""
        rows = min(r.count() for r in (self._features, self._ids, self._logits))
        first = int(np.searchsorted(self._ends, rows, side="right")) - 1
        for part in (self._features, self._ids, self._logits):
            part.cut(int(self._ends[first]))
        progress(first)
        for i in range(first, len(self.samples)):
            lesson = teacher.lesson(self.samples[i])
            self._features.append(np.array(lesson.features.astype(self.dtype).view(_unsigned(self.dtype))))
            self._ids.append(np.array(lesson.top_ids))
            self._logits.append(np.array(lesson.top_logits))
            progress(i + 1)
            if i % 64 == 0:
                mx.clear_cache()

    def lesson(self, i: int) -> Lesson:
        """Read the lesson of sample i."""
        start, end = int(self._ends[i]), int(self._ends[i + 1])
        features = mx.array(self._features.read(start, end)).view(self.dtype)
        ids, logits = mx.array(self._ids.read(start, end)), mx.array(self._logits.read(start, end))
        sample = self.samples[i]
        return Lesson(mx.array(sample.tokens, mx.int32), sample.prompt_length, features, ids, logits)


def _unsigned(dtype: mx.Dtype) -> mx.Dtype:
    return {2: mx.uint16, 4: mx.uint32}[dtype.size]


class _Rows:
    """A file of rows of one type and width."""

    def __init__(self, path: Path, dtype: np.dtype, width: int):
        self.path, self.dtype, self.width = path, dtype, width
        self._bytes = width * dtype.itemsize

    def count(self) -> int:
        return self.path.stat().st_size // self._bytes if self.path.exists() else 0

    def cut(self, rows: int) -> None:
        with self.path.open("ab") as file:
            file.truncate(rows * self._bytes)

    def append(self, rows: np.ndarray) -> None:
        with self.path.open("ab") as file:
            file.write(rows.tobytes())

    def read(self, start: int, end: int) -> np.ndarray:
        return np.fromfile(self.path, self.dtype, (end - start) * self.width, offset=start * self._bytes).reshape(
            -1, self.width
        )
