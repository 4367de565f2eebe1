"""The folder of a training run: its settings, its log, checkpoints to continue from, and the drafts that came of it.

    run.json          what was asked for; another request is refused
    log.jsonl         a line per report: update, loss, speed; and per validation: tokens a round
    checkpoint/       weights, optimizer and counters, whole or not at all
    best/, last/      drafts, as z-lab's folders

Knows files; knows nothing of models.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx


class RunFolder:
    """A new folder, or one to go on with. Raises ValueError if it was begun with other settings."""

    def __init__(self, path: str | Path, settings: dict[str, Any]):
        self.path = Path(path)
        self.path.mkdir(parents=True, exist_ok=True)
        about = self.path / "run.json"
        settings = json.loads(json.dumps(settings))
        if about.exists():
            found = json.loads(about.read_text())
            keys = [key for key in {**found, **settings} if found.get(key) != settings.get(key)]
            if keys:
                told = "; ".join(f"{key} {found.get(key)!r}, now {settings.get(key)!r}" for key in keys)
                raise ValueError(f"{self.path} was begun with {told}; choose another --out")
        else:
            about.write_text(json.dumps(settings, indent=4) + "\n")

    @property
    def log_path(self) -> Path:
        return self.path / "log.jsonl"

    def save(self, state: dict[str, mx.array], counters: dict[str, Any]) -> None:
        """Write a checkpoint in place of the one before."""
        with replaced(self.path / "checkpoint") as part:
            mx.save_safetensors(str(part / "state.safetensors"), state)
            (part / "counters.json").write_text(json.dumps(counters))

    def load(self) -> tuple[dict[str, mx.array], dict[str, Any]] | None:
        """Read the checkpoint, if there is one, and forget what was logged after it."""
        folder = self.path / "checkpoint"
        restore_replaced(folder)
        if not folder.exists():
            self.log_path.unlink(missing_ok=True)
            return None
        counters = json.loads((folder / "counters.json").read_text())
        kept = [line for line in self.log() if line["step"] <= counters["step"]]
        self.log_path.write_text("".join(json.dumps(line) + "\n" for line in kept))
        return mx.load(str(folder / "state.safetensors")), counters

    def note(self, line: dict[str, Any]) -> None:
        """Append to the log."""
        with self.log_path.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def log(self) -> list[dict[str, Any]]:
        """Return the lines of the log; one that was not written to its end is none."""
        lines = self.log_path.read_text().splitlines(keepends=True) if self.log_path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]


class replaced:  # noqa: N801, a context manager in the manner of open
    """Give an empty folder that takes the place of `destination` when the body ends without an error."""

    def __init__(self, destination: Path):
        self.destination = destination
        self._part, self._old = (destination.with_name(f".{destination.name}.{word}") for word in ("part", "old"))

    def __enter__(self) -> Path:
        restore_replaced(self.destination)
        shutil.rmtree(self._part, ignore_errors=True)
        self._part.mkdir(parents=True)
        return self._part

    def __exit__(self, kind: type | None, *details: Any) -> None:
        if kind is not None:
            shutil.rmtree(self._part)
            return
        if self.destination.exists():
            self.destination.rename(self._old)
        self._part.rename(self.destination)
        shutil.rmtree(self._old, ignore_errors=True)


def restore_replaced(destination: Path) -> None:
    """Bring the old folder back if the new one had not taken its place yet."""
    old = destination.with_name(f".{destination.name}.old")
    if old.exists() and not destination.exists():
        old.rename(destination)
    shutil.rmtree(old, ignore_errors=True)
