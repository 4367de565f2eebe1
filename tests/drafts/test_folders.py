"""Folders and files are there whole or not at all, whatever ends their writing."""

import pytest
from huggingface_hub import constants

from mlx_dflash.files.folders import made_once, new_folder, recover_folder, replaced_folder, write_file
from mlx_dflash.files.places import cache_folder


class Killed(BaseException):
    """What ends a process in the middle."""


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_new_folder_that_fails_leaves_nothing(tmp_path):
    with pytest.raises(Killed), new_folder(tmp_path / "a" / "new") as folder:
        (folder / "file").write_text("half")
        raise Killed
    with pytest.raises(ValueError, match="no file was written"), new_folder(tmp_path / "a" / "new"):
        pass
    assert names(tmp_path / "a") == []


def test_of_two_that_make_a_folder_one_gets_the_name(tmp_path):
    with pytest.raises(FileExistsError, match="another process"), new_folder(tmp_path / "new") as slower:
        (slower / "file").write_text("slower")
        with new_folder(tmp_path / "new") as faster:
            (faster / "file").write_text("faster")
    assert names(tmp_path) == ["new"] and (tmp_path / "new" / "file").read_text() == "faster"
    with pytest.raises(ValueError, match="exists already"), new_folder(tmp_path / "new"):
        pass


def test_a_folder_is_made_once_also_when_another_process_is_faster(tmp_path):
    destination, calls = tmp_path / "made", []

    def make():
        calls.append(1)
        with new_folder(destination) as slower:
            (slower / "file").write_text("slower")
            with new_folder(destination) as faster:
                (faster / "file").write_text("faster")

    for _ in range(2):
        assert made_once(destination, make) == destination
    assert calls == [1] and (destination / "file").read_text() == "faster"
    with pytest.raises(ValueError, match="invalid"):
        made_once(tmp_path / "never", lambda: int("x"))


def test_a_replaced_folder_is_the_old_one_or_the_new_one(tmp_path):
    place = tmp_path / "place"
    for text in ("first", "second"):
        with replaced_folder(place) as folder:
            (folder / "file").write_text(text)
    with pytest.raises(Killed), replaced_folder(place) as folder:
        (folder / "file").write_text("third")
        raise Killed
    assert (place / "file").read_text() == "second" and names(tmp_path) == ["place"]
    # Killed between the two renames: the old folder is away, the new one not there yet.
    place.rename(tmp_path / ".place.old")
    recover_folder(place)
    assert (place / "file").read_text() == "second" and names(tmp_path) == ["place"]


def test_a_file_that_cannot_be_written_keeps_its_old_text(tmp_path):
    file = tmp_path / "sub" / "file"
    write_file(file, "old")
    with pytest.raises(UnicodeEncodeError):
        write_file(file, "half \ud800")
    assert file.read_text() == "old" and names(tmp_path / "sub") == ["file"]


def test_the_cache_folder_is_where_the_system_keeps_caches(tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "default_home", str(tmp_path / "home"))
    assert cache_folder() == tmp_path / "home" / "mlx_dflash"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "xdg" / "mlx_dflash"
