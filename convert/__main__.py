"""Command line: mlx-lm's flags; a DFlash draft or a GGUF file is converted here, any other target by mlx-lm.

Decides which of the three it is and refuses flags that one cannot honour; converts nothing itself.
"""

import argparse
import importlib
from pathlib import Path
from types import ModuleType

from . import convert_draft, convert_gguf, is_draft_config
from .draft import Quantization, read_config

EXAMPLES = """examples:
  python -m convert --hf-path z-lab/Qwen3-4B-DFlash-b16 --mlx-path qwen3-4b-dflash -q --q-bits 8
  python -m convert --hf-path SmolLM2-135M-Instruct.Q4_1.gguf --mlx-path smollm2-135m
"""
DRAFT_FLAGS = {"hf_path", "mlx_path", "dtype", "revision", "quantize", "q_bits", "q_group_size"}
GGUF_FLAGS = {"hf_path", "mlx_path", "dtype"}


def main(argv: list[str] | None = None) -> None:
    """Convert what --hf-path names into the new folder --mlx-path."""
    parser = configure_parser()
    options = vars(parser.parse_args(argv))
    try:
        run(parser, options)
    except (ValueError, OSError) as error:
        parser.exit(1, f"{parser.prog}: {error}\n")


def configure_parser() -> argparse.ArgumentParser:
    """mlx_lm.convert's own parser and --revision, which its function has and its command line lacks."""
    parser = mlx_lm_convert().configure_parser()
    parser.prog = "mlx_dflash.convert"
    parser.description = "Convert a DFlash draft, a GGUF target or any model mlx-lm converts to an MLX folder"
    parser.formatter_class, parser.epilog = argparse.RawDescriptionHelpFormatter, EXAMPLES
    parser.add_argument("--revision", help="Branch, tag or commit of the repository on the hub.", default=None)
    return parser


def run(parser: argparse.ArgumentParser, options: dict) -> None:
    """Convert by the kind of the source. Raises ValueError for a flag that this kind has no use for."""
    source = options["hf_path"]
    if source is None:
        raise ValueError("--hf-path is missing: name a folder, a repository on the hub or a .gguf file")
    if source.endswith(".gguf"):
        refuse_flags(parser, options, GGUF_FLAGS, "a GGUF file")
        print(convert_gguf(source, options["mlx_path"], options["dtype"]))
    elif is_draft_config(source_config(source, options["revision"])):
        refuse_flags(parser, options, DRAFT_FLAGS, "a draft")
        folder = source_folder(source, options["revision"])
        print(convert_draft(folder, options["mlx_path"], options["dtype"], quantization_of(options)))
    else:
        mlx_lm_convert().convert(**options)


def mlx_lm_convert() -> ModuleType:
    """Give the module, which in mlx_lm's namespace is hidden by its function of the same name."""
    return importlib.import_module("mlx_lm.convert")


def quantization_of(options: dict) -> Quantization | None:
    """Give what -q asks for, or None. Raises ValueError for sizes without -q."""
    sizes = {"bits": options["q_bits"], "group_size": options["q_group_size"]}
    given = {key: size for key, size in sizes.items() if size is not None}
    if given and not options["quantize"]:
        raise ValueError("--q-bits and --q-group-size go with -q; add it or leave them out")
    return Quantization(**given) if options["quantize"] else None


def refuse_flags(parser: argparse.ArgumentParser, options: dict, honoured: set[str], kind: str) -> None:
    """Raise ValueError for a flag that was set and would be dropped."""
    for name, value in options.items():
        if name not in honoured and value != parser.get_default(name):
            raise ValueError(f"--{name.replace('_', '-')} does not apply to {kind}; leave it out")


def source_config(source: str, revision: str | None) -> dict:
    """Read config.json of a local folder or a repository on the hub."""
    if Path(source).exists():
        return read_config(Path(source))
    from huggingface_hub import hf_hub_download

    return read_config(Path(hf_hub_download(source, "config.json", revision=revision)).parent)


def source_folder(source: str, revision: str | None) -> Path:
    """Give the local folder, or download the draft's configuration and weights from the hub."""
    if Path(source).exists():
        return Path(source)
    from huggingface_hub import snapshot_download

    patterns = ["config.json", "*.safetensors", "*.safetensors.index.json"]
    return Path(snapshot_download(source, revision=revision, allow_patterns=patterns))


if __name__ == "__main__":
    main()
