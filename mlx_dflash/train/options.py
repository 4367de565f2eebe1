"""The options of training, as data: their fields are the flags of `train fit`, with their defaults.

Knows which values make sense by themselves; knows nothing of the command line, of models, or of how they are used.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from .loss import Weighting
from .new_draft import SIZES
from .trainer import Recipe

FLOATS = ("bfloat16", "float16", "float32")
FEATURES = ("disk", "recompute")
COMPUTED_IN = ("float32", "bfloat16")

# Where a run is written, how often, and in which form does not change what it learns.
_FREE = ("out", "trust_remote_code", "valid_every", "save_every", "features", "save_dtype")
_CHOICES = {
    "size": tuple(SIZES),
    "features": FEATURES,
    "feature_dtype": FLOATS,
    "save_dtype": FLOATS,
    "dtype": COMPUTED_IN,
}
_LEAST = {"max_length": 3, "valid_every": 1, "save_every": 1, "valid_tokens": 2, "valid_count": 0, "seed": 0}


@dataclass(frozen=True, kw_only=True)
class FitOptions:
    """The options of a training run; `python -m mlx_dflash.train fit --help` says what each one means.

    Raises ValueError for values that make no sense, with the name of the flag.
    """

    model: str
    data: Sequence[str | Path]
    out: str | Path
    trust_remote_code: bool = False
    # The draft.
    init_draft: str | None = None
    size: str | None = None
    block_size: int | None = None
    draft_vocab: int | None = None
    save_dtype: str = "bfloat16"
    # The recipe.
    steps: int | None = None
    visits: float = 6.0
    batch_size: int = 4
    anchors: int = 32
    block_sizes: Sequence[int] | None = None
    learning_rate: float = 6e-4
    warmup: int | None = None
    weight_decay: float = 0.01
    clip: float = 1.0
    decay: float = 3.0
    soft: float = 0.5
    loss_vocab: int | None = None
    dtype: str = "float32"
    grad_checkpoint: bool = False
    seed: int = 0
    # Lessons and validation.
    features: str = "disk"
    feature_dtype: str | None = None
    max_length: int = 2048
    valid_data: str | Path | None = None
    valid_count: int = 16
    valid_tokens: int = 128
    valid_every: int = 200
    save_every: int = 50

    def __post_init__(self):
        if isinstance(self.data, (str, Path)):
            raise ValueError(f"data must be a list of files, got {self.data!r}")
        for name, least in _LEAST.items():
            if getattr(self, name) < least:
                raise ValueError(f"--{name.replace('_', '-')} must be {least} or more, got {getattr(self, name)}")
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in (None, *choices):
                told = f"--{name.replace('_', '-')} must be one of {', '.join(choices)}"
                raise ValueError(f"{told}; got {getattr(self, name)!r}")
        if not 0 < self.visits < float("inf"):
            raise ValueError(f"--visits must be above 0, got {self.visits}")
        if self.feature_dtype and self.features == "recompute":
            raise ValueError("--feature-dtype is of the features on disk; with --features recompute there are none")
        if self.init_draft and self.size:
            raise ValueError("--size makes a new draft, --init-draft goes on with one: give one of them")
        self.weighting()

    def weighting(self) -> Weighting:
        """Return the weights of the slots in the loss."""
        return Weighting(self.decay, self.soft)

    def recipe(self, num_samples: int, num_machines: int) -> Recipe:
        """Return how the draft is fitted to so many samples, which the machines share."""
        steps = self.steps
        if steps is None:
            steps = max(1, round(self.visits * num_samples / (max(1, self.batch_size) * num_machines)))
        return Recipe(
            steps=steps,
            batch_size=self.batch_size,
            anchors=self.anchors,
            block_sizes=tuple(self.block_sizes or ()),
            learning_rate=self.learning_rate,
            warmup=min(100, steps // 10) if self.warmup is None else self.warmup,
            weight_decay=self.weight_decay,
            clip=self.clip,
            seed=self.seed,
            dtype=self.dtype,
            checkpointed=self.grad_checkpoint,
        )

    def settings(self) -> dict[str, Any]:
        """Return what the result depends on, as JSON holds it; only a run with the same settings can be continued."""
        found = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in _FREE}
        paths = {
            name: None if found[name] is None else str(found[name]) for name in ("model", "init_draft", "valid_data")
        }
        sizes = None if self.block_sizes is None else list(self.block_sizes)
        return found | paths | {"block_sizes": sizes, "data": [str(Path(path)) for path in self.data]}


@dataclass(frozen=True, kw_only=True)
class DataOptions:
    """The options of writing training text; `python -m mlx_dflash.train data --help` says what each one means.

    One of prompts, own_prompts and text says where the text comes from. Raises ValueError for values that make no
    sense or would do nothing, with the name of the flag.
    """

    model: str
    out: str | Path
    trust_remote_code: bool = False
    prompts: str | Path | None = None
    own_prompts: int | None = None
    text: str | Path | None = None
    # Of answers.
    max_tokens: int = 256
    sampled_share: float = 0.5
    temp: float = 0.7
    top_p: float = 1.0
    batch_size: int = 32
    seed: int = 0
    draft_model: str | None = None
    # Of text as it is.
    max_length: int = 2048

    def __post_init__(self):
        sources = [name for name in ("prompts", "own_prompts", "text") if getattr(self, name) is not None]
        if len(sources) != 1:
            raise ValueError(f"give one of --prompts, --own-prompts and --text, got {len(sources)} of them")
        unused = [key for key in self.defaults() if (key == "max_length") != (sources == ["text"])]
        given = [_flag(key) for key in unused if getattr(self, key) != self.defaults()[key]]
        if given:
            raise ValueError(f"{', '.join(given)} cannot go with {_flag(sources[0])}")
        for name, least in (("batch_size", 1), ("max_length", 2), ("seed", 0), ("own_prompts", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"{_flag(name)} must be {least} or more, got {value}")
        path = self.prompts or self.text
        if path and not Path(path).exists():
            raise ValueError(f"{path} does not exist")

    @classmethod
    def defaults(cls) -> dict[str, Any]:
        """Return the defaults of what an answer or a text may be, by name."""
        first = [field.name for field in fields(cls)].index("max_tokens")
        return {field.name: field.default for field in fields(cls)[first:]}


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
