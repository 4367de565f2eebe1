"""The settings that a person can change between two answers: sampling, length, reasoning. Knows numbers only."""

from dataclasses import asdict, dataclass, fields
from typing import Any

from ..commands.sampling import NUMBERS, sampler
from ..dice import Sampler

_LOWEST = {"max_tokens": -1}
_HIGHEST = {"top_p": 1.0, "min_p": 1.0, "xtc_probability": 1.0, "xtc_threshold": 1.0}


@dataclass
class Settings:
    """Sampling and length, in mlx-lm's names. thinking: whether to ask for reasoning, if the chat template can."""

    temp: float = 0.0
    top_p: float = 1.0
    min_p: float = 0.0
    top_k: int = 0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.0
    max_tokens: int = 1024
    thinking: bool = True

    def __post_init__(self):
        for name, value in asdict(self).items():
            self.set(name, value)

    def set(self, name: str, value: Any) -> None:
        """Change one setting; value may be its text. Raises ValueError that says what can be set."""
        kinds = {field.name: field.type for field in fields(self)}
        if name not in kinds:
            raise ValueError(f"there is no setting {name!r}; there are {', '.join(kinds)}")
        if kinds[name] is bool:
            setattr(self, name, on_or_off(name, value))
            return
        try:
            number = kinds[name](value)
        except (TypeError, ValueError):
            raise ValueError(
                f"{name} must be {'a whole number' if kinds[name] is int else 'a number'}, got {value!r}"
            ) from None
        low, high = _LOWEST.get(name, 0), _HIGHEST.get(name, float("inf"))
        if not low <= number <= high or (name == "max_tokens" and number == 0):
            bounds = "-1 for no limit, or positive" if name == "max_tokens" else f"from {low} to {high}"
            raise ValueError(f"{name} must be {bounds}, got {value}")
        setattr(self, name, number)

    def sampler(self, tokenizer: Any) -> Sampler:
        """Make mlx-lm's sampler with these settings."""
        numbers = asdict(self)
        return sampler(tokenizer, **{name: numbers[name] for name in NUMBERS if name in numbers})


def on_or_off(name: str, value: Any) -> bool:
    """Return True for on and False for off. Raises ValueError for anything else."""
    if isinstance(value, bool):
        return value
    if value not in ("on", "off"):
        raise ValueError(f"{name} must be on or off, got {value!r}")
    return value == "on"
