"""Files and folders that are there whole or not at all, and that one process writes at a time. Knows files only."""

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
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


@contextmanager
def replaced(destination: Path) -> Iterator[Path]:
    """Give an empty folder that takes the place of `destination` when the body ends without an error."""
    recover_replaced(destination)
    part = destination.with_name(f".{destination.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    try:
        yield part
        if destination.exists():
            destination.rename(_old(destination))
        part.rename(destination)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    shutil.rmtree(_old(destination), ignore_errors=True)


def recover_replaced(destination: Path) -> None:
    """Bring the old folder back if the new one had not taken its place yet."""
    old = _old(destination)
    if old.exists() and not destination.exists():
        old.rename(destination)
    shutil.rmtree(old, ignore_errors=True)


def _old(destination: Path) -> Path:
    return destination.with_name(f".{destination.name}.old")


def refuse_other(path: Path, found: dict[str, Any], wanted: dict[str, Any], remedy: str) -> None:
    """Raise ValueError that names what differs if a file was begun with other settings. remedy: what to choose."""
    keys = sorted(key for key in found.keys() | wanted.keys() if found.get(key) != wanted.get(key))
    if keys:
        told = "; ".join(f"{key} {found.get(key)!r}, now {wanted.get(key)!r}" for key in keys)
        raise ValueError(f"{path} was begun with {told}; choose {remedy}")
