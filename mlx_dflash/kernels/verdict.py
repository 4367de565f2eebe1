"""The verdict on a kernel for one shape: whether the kernel runs or its twin, and why.

A verdict comes from a self-check and a race. Knows trials, and the form of a verdict in the record; knows nothing of
files, or of the calls for which a verdict holds.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from . import attention, trial
from .call import Runner
from .matmul import Quantized


@dataclass(frozen=True)
class Verdict:
    """The result of trying one shape out.

    refused: why the twin runs, in one sentence; None if the kernel runs. is_slower: the kernel is right, but lost the
    race. is_temporary: Metal refused a launch, which may be for want of memory, so the verdict is not to be remembered.
    cores, simdgroups: how attend_metal cuts up a call; None for its own choice. ms: the times of the race, see Race.
    """

    refused: str | None = None
    is_slower: bool = False
    is_temporary: bool = False
    cores: int | None = None
    simdgroups: int | None = None
    ms: dict[str, tuple[float, float]] = field(default_factory=dict)

    @classmethod
    def from_entry(cls, entry: dict[str, Any]) -> "Verdict":
        """Read an entry of the record. Keys that are not known are passed over."""
        known = {one.name: entry[one.name] for one in fields(cls) if one.name in entry}
        return cls(**known | {"ms": {context: tuple(times) for context, times in entry.get("ms", {}).items()}})

    def to_entry(self) -> dict[str, Any]:
        """Return the entry for the record: `refused`, and every other field that is not false or empty."""
        return {name: value for name, value in asdict(self).items() if value or name == "refused"}

    @property
    def cut(self) -> dict[str, int]:
        """The arguments by which attend_metal cuts up a call."""
        return {name: value for name in ("cores", "simdgroups") if (value := getattr(self, name)) is not None}


def try_attention(shape: trial.AttentionShape, run: Runner) -> Verdict:
    """Try an attention kernel out; where Metal refuses a launch, again with half the simdgroups in a threadgroup."""
    verdict = _try_attention(shape, run, attention.SIMDGROUPS)
    return _try_attention(shape, run, attention.SIMDGROUPS // 2) if verdict.is_temporary else verdict


def _try_attention(shape: trial.AttentionShape, run: Runner, simdgroups: int) -> Verdict:
    verdict = _try_out(
        lambda: trial.check_attention(shape, run, simdgroups=simdgroups),
        lambda: trial.race_attention(shape, run, simdgroups=simdgroups),
    )
    return replace(verdict, simdgroups=simdgroups)


def try_product(x_shape: tuple[int, ...], w: Quantized, run: Runner) -> Verdict:
    """Try the kernel of a product out on weights and made-up rows of x_shape."""
    return _try_out(lambda: trial.check_product(x_shape, w, run), lambda: trial.race_product(x_shape, w, run))


def _try_out(check: Callable[[], trial.Accuracy], race: Callable[[], trial.Race]) -> Verdict:
    """Check a kernel, then let it race its twin. A launch that Metal refuses counts as a failed check."""
    try:
        if wrong := check().wrong:
            return Verdict(wrong)
        result = race()
    except (RuntimeError, ValueError) as error:
        return Verdict(f"{type(error).__name__}: {str(error).splitlines()[0]}", is_temporary=True)
    is_slower = result.gain < trial.NEEDED_GAIN
    refused = f"it is {result.gain:.2f} times as fast as stock" if is_slower else None
    return Verdict(refused, is_slower, cores=result.cores, ms=result.ms)
