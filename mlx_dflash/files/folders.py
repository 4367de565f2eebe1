"""Folders and files that are there whole or not at all. Knows the disk; knows nothing of what they hold."""

import os
import shutil
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path


def write_file(path: Path, text: str) -> None:
    """Write a file in place of an older one; a reader sees one text or the other. Its folder is made if needed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replaced_file(path) as part:
        part.write_text(text, encoding="utf-8")


@contextmanager
def replaced_file(path: Path) -> Iterator[Path]:
    """Give the name of a file that takes the place of `path` when the body ends without an error.

    It has the same suffix and stands in the same folder. On any error it is removed, and an older file stays.
    """
    part = path.with_name(f".{uuid.uuid4().hex[:12]}.part{path.suffix}")
    try:
        yield part
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def check_writable(path: Path) -> None:
    """Raise OSError that names the file if it cannot be written: to tell before the work that makes its contents."""
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder; expected the name of a file")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"{path} cannot be written: there is no folder {path.parent}")
    place = path if path.exists() else path.parent
    if not os.access(place, os.W_OK):
        raise PermissionError(f"{path} cannot be written: {place} is read-only for this user")


@contextmanager
def new_folder(destination: str | Path) -> Iterator[Path]:
    """Give an empty folder next to `destination` that takes its name when the body ends without an error.

    Raises ValueError if the destination exists already or the body wrote nothing. On any error the folder is removed.
    Of two processes that finish at once, one gets the name and the other a FileExistsError.
    """
    destination = Path(destination)
    refuse_existing(destination)
    with _part(destination, f".{destination.name}.{uuid.uuid4().hex[:12]}.part") as part:
        yield part
        if not any(part.iterdir()):
            raise ValueError(f"no file was written for {destination}")
        _take_name(part, destination)


def refuse_existing(destination: str | Path) -> None:
    """Raise ValueError if there is anything under that name."""
    if Path(destination).exists():
        raise ValueError(f"{destination} exists already; remove it or choose another folder")


def made_once(destination: Path, make: Callable[[], object]) -> Path:
    """Return a folder, made first if it is not there. make: makes it with new_folder.

    Another process may make it at the same time; then its folder is returned. Raises what make raises otherwise.
    """
    if not destination.exists():
        try:
            make()
        except (FileExistsError, ValueError):
            if not destination.exists():
                raise
    return destination


@contextmanager
def replaced_folder(destination: Path) -> Iterator[Path]:
    """Give an empty folder that takes the place of `destination` when the body ends without an error.

    One process at a time may do this. What it leaves when it is killed, recover_folder puts right.
    """
    recover_folder(destination)
    part = f".{destination.name}.part"
    shutil.rmtree(destination.with_name(part), ignore_errors=True)
    with _part(destination, part) as folder:
        yield folder
        if destination.exists():
            destination.rename(_old(destination))
        folder.rename(destination)
    shutil.rmtree(_old(destination), ignore_errors=True)


def recover_folder(destination: Path) -> None:
    """Bring the old folder back if the new one had not taken its place yet."""
    old = _old(destination)
    if old.exists() and not destination.exists():
        old.rename(destination)
    shutil.rmtree(old, ignore_errors=True)


@contextmanager
def _part(destination: Path, name: str) -> Iterator[Path]:
    part = destination.with_name(name)
    part.mkdir(parents=True)
    try:
        yield part
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _old(destination: Path) -> Path:
    return destination.with_name(f".{destination.name}.old")


def _take_name(part: Path, destination: Path) -> None:
    # A rename onto an empty folder would succeed, and one onto a full one fail with an error that names neither.
    if destination.exists():
        raise FileExistsError(f"{destination} was made by another process meanwhile")
    try:
        part.rename(destination)
    except OSError as error:
        if destination.exists():
            raise FileExistsError(f"{destination} was made by another process meanwhile") from error
        raise
