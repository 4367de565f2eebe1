"""Folders and files from the Hugging Face hub, or from this disk, whatever a user's name for a model means.

Knows names, the hub client and its errors; reads no weights.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from .safetensors import MASK_FILE, is_draft_config, read_config


def local_path(path_or_hf_repo: str) -> Path | None:
    """Return the local folder or .gguf file, or None for what can only be on the hub: OWNER/NAME[/FILE.gguf] or NAME.

    Raises FileNotFoundError for a path that does not exist, ValueError for a file that is no .gguf file.
    """
    path = Path(path_or_hf_repo).expanduser()
    if path.is_dir() or path.is_file() and path.suffix == ".gguf":
        return path
    if path.exists():
        raise ValueError(
            f"{path} is a file; expected a model folder, a .gguf file or a repository of the Hugging Face hub"
        )
    name = str(path_or_hf_repo)
    is_hub_file = name.count("/") == 2 and name.endswith(".gguf")
    if name.startswith((".", "/", "~")) or name.count("/") > 1 and not is_hub_file:
        raise FileNotFoundError(f"there is no folder {path}")
    return None


def file_inside(path: Path) -> Path:
    """Return the one GGUF file of a folder without config.json; any other path as it is."""
    if path.is_dir() and not (path / "config.json").is_file() and len(files := list(path.glob("*.gguf"))) == 1:
        return files[0]
    return path


def download_draft(repo: str, revision: str | None = None) -> Path:
    """Return the folder of a draft from the hub, or the file OWNER/NAME/FILE.gguf; with progress bars.

    config.json comes first, so that a repository that holds no draft costs no download. Raises ValueError that says
    what to do for a gated, missing or unreachable repository.
    """
    from huggingface_hub import hf_hub_download, snapshot_download

    if repo.endswith(".gguf"):
        owner, name, file = repo.split("/")
        return Path(from_hub(repo, lambda: hf_hub_download(f"{owner}/{name}", file, revision=revision)))

    def get(patterns: list[str]) -> Path:
        return Path(from_hub(repo, lambda: snapshot_download(repo, revision=revision, allow_patterns=patterns)))

    folder = draft_folder(get(["*.json"]))
    if not (folder / "config.json").is_file():
        raise ValueError(f"{repo} has no config.json; if it holds GGUF files, name one as {repo}/FILE.gguf")
    if not is_draft_config(read_config(folder)):
        return folder
    inside = "dflash/" if folder.name == "dflash" else ""
    get([f"{inside}*.safetensors", f"{inside}{MASK_FILE}"])
    return folder


def draft_folder(folder: Path) -> Path:
    """Return the folder, or its subfolder "dflash" where a target brings its draft along."""
    inside = folder / "dflash"
    is_draft = (folder / "config.json").is_file() and is_draft_config(read_config(folder))
    return inside if not is_draft and (inside / "config.json").is_file() else folder


def from_hub(repo: str, download: Callable[[], Any]) -> Any:
    """Call the download, and turn the hub's errors into ValueErrors that say what to do."""
    from huggingface_hub.errors import (
        EntryNotFoundError,
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        return download()
    except GatedRepoError as error:
        raise ValueError(
            f"{repo} is gated: accept its terms at https://huggingface.co/{repo} and run `hf auth login`"
        ) from error
    except LocalEntryNotFoundError as error:
        raise ValueError(
            f"{repo} is neither a local folder nor in the hub's cache, and the hub cannot be reached"
        ) from error
    except RevisionNotFoundError as error:
        raise ValueError(f"{repo} has no such revision; see https://huggingface.co/{repo}/tree/main") from error
    except (EntryNotFoundError, HFValidationError) as error:
        raise ValueError(f"{repo} names no file or repository of the hub: {error}") from error
    except RepositoryNotFoundError as error:
        raise ValueError(f"{repo} is neither a local folder nor a repository of the hub that you may read") from error
    except HfHubHTTPError as error:
        raise ValueError(f"the hub does not give {repo}: {error}") from error
