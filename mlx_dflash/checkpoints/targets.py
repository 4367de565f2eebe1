"""Targets through mlx-lm: what is no target is refused by name. Knows nothing of how a target is used."""

from pathlib import Path
from typing import Any

from ..demo import DEMO, local_target
from ..files.hub import from_hub
from ..files.safetensors import is_draft_config, read_config
from ..models.evaluation import evaluate
from .packing import fit_to_device

_TOKENIZER_FILES = ["*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken"]


def load(
    path_or_hf_repo: str,
    tokenizer_config: dict[str, Any] | None = None,
    model_config: dict[str, Any] | None = None,
    adapter_path: str | None = None,
    lazy: bool = False,
    return_config: bool = False,
    revision: str | None = None,
    trust_remote_code: bool = False,
):
    """Load a target and its tokenizer, as mlx_lm.load does; "demo" is the target of the demo pair.

    path_or_hf_repo: a local folder or a repository of the Hugging Face hub. Returns (model, tokenizer) or, with
    return_config, (model, tokenizer, config). Raises ValueError for a DFlash draft, FileNotFoundError for no folder.
    """
    import mlx_lm

    path = local_target(path_or_hf_repo)
    if path is not None and path.is_file():
        raise ValueError(
            f"{path} is a GGUF file; convert it first: python -m mlx_dflash.convert --hf-path {path} --mlx-path FOLDER"
        )
    if path is not None and is_draft_config(read_config(path)):
        raise ValueError(
            f"{path} holds a DFlash draft, not a target; load it with load_draft, or pass it as --draft-model"
        )
    options = dict(
        tokenizer_config=tokenizer_config,
        model_config=model_config,
        adapter_path=adapter_path,
        lazy=lazy,
        return_config=True,
        revision=revision,
        trust_remote_code=trust_remote_code,
    )
    name = str(path or path_or_hf_repo)
    model, tokenizer, config = from_hub(name, lambda: mlx_lm.load(name, **options))
    if path_or_hf_repo == DEMO:
        model = fit_to_device(model)
    if not lazy:
        evaluate(model)
    return (model, tokenizer, config) if return_config else (model, tokenizer)


def load_tokenizer(path_or_hf_repo: str) -> Any:
    """Load the tokenizer of a target alone: of a folder, a repository of the hub, or "demo"."""
    from mlx_lm import tokenizer_utils
    from mlx_lm.utils import _download

    path = local_target(path_or_hf_repo)
    if path is None:
        files = from_hub(path_or_hf_repo, lambda: _download(path_or_hf_repo, allow_patterns=_TOKENIZER_FILES))
        path = Path(files)
    return tokenizer_utils.load(path)
