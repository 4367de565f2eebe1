"""Files and folders that are there whole or not at all, and that one process writes at a time. Knows files only."""

import fcntl
import os
import shutil
from pathlib import Path
from typing import Any, TextIO

import mlx.core as mx


def write_whole(path: Path, text: str) -> None:
    """Write a file in place of an older one."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    part.write_text(text, encoding="utf-8")
    part.replace(path)


def open_alone(path: Path) -> TextIO:
    """Open a file to append to, until it is closed for this process alone. Raises ValueError if another one has it."""
    file = path.open("a", encoding="utf-8")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        file.close()
        raise ValueError(f"{path} is being written by another process; wait for its end, or write elsewhere") from error
    return file


def save_arrays(path: Path, arrays: dict[str, mx.array]) -> None:
    """Write a safetensors file. Raises OSError that names it, where MLX does not."""
    mx.eval(arrays)
    try:
        mx.save_safetensors(str(path), arrays, metadata={"format": "pt"})
    except RuntimeError as error:
        raise OSError(f"{path} cannot be written, is the disk full? {error}") from error


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
