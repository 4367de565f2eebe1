"""Files that one process writes at a time, and that must have been begun with the same settings. Knows files only."""

import fcntl
from pathlib import Path
from typing import Any, TextIO

from ..files.json_text import told


def open_alone(path: Path) -> TextIO:
    """Open a file to append to, until it is closed for this process alone. Raises ValueError if another one has it."""
    file = path.open("a", encoding="utf-8")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        file.close()
        raise ValueError(f"{path} is being written by another process; wait for its end, or write elsewhere") from error
    return file


def refuse_other(path: Path, found: dict[str, Any], wanted: dict[str, Any], remedy: str) -> None:
    """Raise ValueError that names what differs if a file was begun with other settings. remedy: what to choose."""
    keys = sorted(key for key in found.keys() | wanted.keys() if found.get(key) != wanted.get(key))
    if keys:
        parts = "; ".join(f"{told(key)[1:-1]} {told(found.get(key))}, now {told(wanted.get(key))}" for key in keys[:8])
        raise ValueError(f"{path} was begun with {parts}; choose {remedy}")
