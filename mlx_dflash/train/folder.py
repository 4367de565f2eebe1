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
from ..files.json_text import parse_json, read_json
from ..files.safetensors import read_safetensors, write_safetensors
from .files import open_alone, refuse_other


class RunFolder:
    """A new folder, or one to go on with. is_writer: of the machines that share it, one writes.

    Raises ValueError if it was begun with other settings, holds anything else than a run, or if another process writes
    there.
    """

    def __init__(self, path: str | Path, settings: dict[str, Any], is_writer: bool = True):
        self.path, self.is_writer = Path(path), is_writer
        self.path.mkdir(parents=True, exist_ok=True)
        if is_writer:
            self._refuse_foreign()
            self._lock = open_alone(self.path / "lock")
        try:
            self._keep(json.loads(json.dumps(settings)))
        except ValueError:
            self.close()
            raise

    def _keep(self, settings: dict[str, Any]) -> None:
        """Write the settings down, or check that they are those of the folder."""
        about = self.path / "run.json"
        if about.exists():
            refuse_other(self.path, read_json(about), settings, "another --out")
        elif self.is_writer:
            write_file(about, json.dumps(settings, indent=4) + "\n")

    def _refuse_foreign(self) -> None:
        """Raise ValueError if something lies there that no run has written: a run replaces whole folders."""
        ours = {"run.json", "lock"}  # what a run begins with
        found = {path.name for path in self.path.iterdir() if not path.match(".run.json.*.part")}
        if "run.json" not in found and found - ours:
            raise ValueError(
                f"{self.path} holds {min(found - ours)} and is not the folder of a run; choose an empty folder as --out"
            )

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
        """Read the checkpoint, if there is one.

        Raises ValueError or FileNotFoundError that name the file for a damaged one.
        """
        folder = self.path / "checkpoint"
        if self.is_writer:
            for place in (folder, *self._drafts):
                recover_folder(place)
        counters = _read_counters(folder / "counters.json") if folder.exists() else None
        return None if counters is None else (read_safetensors(folder / "state.safetensors"), counters)

    def forget_after(self, step: int | None) -> None:
        """Drop what was logged after an update; None for all."""
        if self.is_writer:
            kept = [line for line in self.log() if step is not None and line["step"] <= step]
            write_file(self.log_path, "".join(json.dumps(line) + "\n" for line in kept))

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
        lines = self.log_path.read_bytes().splitlines(keepends=True) if self.log_path.exists() else []
        return [_log_line(f"{self.log_path}, line {i + 1}", s) for i, s in enumerate(lines) if s.endswith(b"\n")]


def _log_line(place: str, text: bytes) -> dict[str, Any]:
    try:
        line = parse_json(text)
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from error
    if not isinstance(line, dict) or type(line.get("step")) is not int:
        raise ValueError(f"{place}: expected an object with the number of an update as step")
    return line


def _read_counters(file: Path) -> dict[str, Any]:
    counters = read_json(file)
    step, best = counters.get("step"), counters.get("best")
    if type(step) is not int or not 1 <= step < 2**31 or type(best) not in (int, float) or not 0 <= best < 1e6:
        raise ValueError(f"{file} has step {str(step)[:40]} and best {str(best)[:40]}; expected two positive numbers")
    return counters
