"""The folder of a training run: its settings, its log, checkpoints to continue from, and the drafts that came of it.

    run.json          what was asked for; another request is refused
    log.jsonl         a line per report: update, loss, speed; and per validation: tokens a round
    checkpoint/       weights, optimizer and counters, whole or not at all
    best/, last/      drafts, as z-lab's folders
    lock              held by the process that writes here

Knows files; knows nothing of models.
"""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx

from ..files.folders import recover_folder, replaced_folder, write_file
from ..files.safetensors import write_safetensors
from .files import open_alone, refuse_other


class RunFolder:
    """A new folder, or one to go on with. is_writer: of the machines that share it, one writes.

    Raises ValueError if it was begun with other settings, or if another process writes there.
    """

    def __init__(self, path: str | Path, settings: dict[str, Any], is_writer: bool = True):
        self.path, self.is_writer = Path(path), is_writer
        self.path.mkdir(parents=True, exist_ok=True)
        if is_writer:
            self._lock = open_alone(self.path / "lock")
        about = self.path / "run.json"
        settings = json.loads(json.dumps(settings))
        if about.exists():
            refuse_other(self.path, json.loads(about.read_text()), settings, "another --out")
        elif is_writer:
            write_file(about, json.dumps(settings, indent=4) + "\n")

    def close(self) -> None:
        """Let other processes write here."""
        if self.is_writer:
            self._lock.close()

    @property
    def log_path(self) -> Path:
        return self.path / "log.jsonl"

    def save(self, state: dict[str, mx.array], counters: dict[str, Any]) -> None:
        """Write a checkpoint in place of the one before."""
        with replaced_folder(self.path / "checkpoint") as part:
            write_safetensors(part / "state.safetensors", state)
            (part / "counters.json").write_text(json.dumps(counters))

    def load(self) -> tuple[dict[str, mx.array], dict[str, Any]] | None:
        """Read the checkpoint, if there is one, and forget what was logged after it."""
        folder = self.path / "checkpoint"
        if self.is_writer:
            for place in (folder, *self._drafts):
                recover_folder(place)
        counters = json.loads((folder / "counters.json").read_text()) if folder.exists() else None
        if self.is_writer:
            kept = [line for line in self.log() if counters and line["step"] <= counters["step"]]
            write_file(self.log_path, "".join(json.dumps(line) + "\n" for line in kept))
        return None if counters is None else (mx.load(str(folder / "state.safetensors")), counters)

    def drafts(self) -> list[Path]:
        """Folders of the drafts that were written."""
        return [path for path in self._drafts if path.exists()]

    @property
    def _drafts(self) -> list[Path]:
        return [self.path / name for name in ("best", "last")]

    def note(self, line: dict[str, Any]) -> None:
        """Append to the log."""
        with self.log_path.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def log(self) -> list[dict[str, Any]]:
        """Return the lines of the log; one that was not written to its end is none."""
        lines = self.log_path.read_text().splitlines(keepends=True) if self.log_path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]
