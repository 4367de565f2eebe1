"""The samples that a fit learns from and is measured on, split and shared out, and their lessons on disk or made anew.

Knows the files of training text and the teacher; knows nothing of the draft's weights.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import numpy as np

from .lessons import Lessons, LessonStore, Teacher
from .text.corpus import Sample, read_corpus, read_header


@dataclass(frozen=True)
class Material:
    """Samples to learn from and, of others, greedy ones to be measured on."""

    learned: list[Sample]
    measured: list[Sample]
    num_left_out: int

    def counts(self, vocab_size: int) -> np.ndarray:
        """(V,) how often each token is part of an answer."""
        counts = np.zeros(vocab_size, np.int64)
        for sample in self.learned:
            np.add.at(counts, sample.tokens[sample.prompt_length :], 1)
        return counts

    def fingerprint(self) -> str:
        """A text that differs when the samples do."""
        digest = hashlib.sha256()
        for sample in [*self.learned, *self.measured]:
            digest.update(np.array([sample.prompt_length, len(sample.tokens), *sample.tokens], np.int64).tobytes())
        return digest.hexdigest()[:16]


def read_material(paths: Sequence[str], valid: str | None, count: int, max_length: int, vocab_size: int) -> Material:
    """Read training text; take `count` greedy samples to be measured on, from the file `valid` or out of the others.

    Samples are cut to max_length tokens; left out are those that then have less than two tokens of an answer, and those
    with the tokens of one that is measured. Raises ValueError for a file of another target's vocabulary or given twice,
    and where nothing is left.
    """
    if len({Path(path) for path in paths}) != len(paths):
        raise ValueError(f"--data names a file twice: {', '.join(paths)}")
    for path in [*paths, *([valid] if valid else [])]:
        found = read_header(path)["vocab_size"]
        if found != vocab_size:
            raise ValueError(f"{path} holds tokens of a vocabulary of {found}, the target has {vocab_size}")

    def usable(samples: Sequence[Sample]) -> list[Sample]:
        cut = [Sample(**{**vars(s), "tokens": s.tokens[:max_length]}) for s in samples]
        return [s for s in cut if len(s.tokens) - s.prompt_length >= 2]

    everything = [sample for path in paths for sample in read_corpus(path)]
    learned = usable(everything)
    if valid:
        measured = [s for s in usable(list(read_corpus(valid))) if s.is_greedy][:count]
        if not measured and count:
            raise ValueError(f"{valid} holds no greedy answers; write it with: train data --sampled-share 0")
    else:
        greedy = [i for i, s in enumerate(learned) if s.is_greedy]
        # Evenly from the whole, and never so many that little is left to learn from.
        count = min(count, len(greedy), len(learned) // 5)
        measured = [learned[greedy[i * len(greedy) // count]] for i in range(count)]
    held_out = {tuple(s.tokens) for s in measured}
    learned = [s for s in learned if tuple(s.tokens) not in held_out]
    if not learned:
        raise ValueError(
            f"{', '.join(paths)}: no answer, of two tokens or more below --max-length and not held out, to learn from"
        )
    num_others = 0 if valid else len(measured)
    return Material(learned, measured, len(everything) - len(learned) - num_others)


def stored_lessons(
    folder: Path, teacher: Teacher, material: Material, dtype: str, progress: Callable[[int], None]
) -> tuple[Lessons, Lessons]:
    """Lessons to learn from and to be measured on, in two folders, made as far as they are missing.

    progress gets the number of those that are there.
    """
    about = {"text": material.fingerprint(), "taps": list(teacher.target_layer_ids)}
    stores, before = [], 0
    for name, samples in (("learned", material.learned), ("measured", material.measured)):
        store = LessonStore(
            folder / name, samples, getattr(mx, dtype), teacher.width, {"samples": len(samples), **about}
        )
        store.fill(teacher, lambda done, before=before: progress(before + done))
        stores.append(store)
        before += len(samples)
    return tuple(stores)


def order_of_visit(num_samples: int, step: int, batch_size: int, seed: int) -> list[int]:
    """The samples of update `step`: every sample comes once in each visit of all, in an order of its own."""
    start = step * batch_size
    first, last = start // num_samples, (start + batch_size - 1) // num_samples
    order = np.concatenate(
        [np.random.default_rng((seed, visit)).permutation(num_samples) for visit in range(first, last + 1)]
    )
    return order[start - first * num_samples :][:batch_size].tolist()
