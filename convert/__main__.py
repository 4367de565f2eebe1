"""Command line: mlx-lm's flags and a few more; a DFlash draft or a GGUF file is converted here, a target by mlx-lm.

Decides which of the three it is and refuses flags that one cannot honour; converts nothing itself.
"""

import argparse
import importlib
from pathlib import Path

from mlx_dflash.checkpoints.gguf import ARCHITECTURES
from mlx_dflash.commands.errors import user_errors
from mlx_dflash.files.gguf_header import gguf_architecture
from mlx_dflash.files.hub import download_draft, draft_folder, file_inside, from_hub, local_path
from mlx_dflash.files.safetensors import is_draft_config, read_config

from . import convert_draft, convert_gguf, convert_target
from .card import origin_of
from .draft import Changes, Quantization

EXAMPLES = """examples:
  python -m mlx_dflash.convert --hf-path z-lab/Qwen3-4B-DFlash-b16 --mlx-path qwen3-4b-dflash -q --q-bits 8 --check
  python -m mlx_dflash.convert --hf-path z-lab/Qwen3-4B-DFlash-b16 --mlx-path small \\
    --draft-vocab 32000 --target Qwen/Qwen3-4B
  python -m mlx_dflash.convert --hf-path SmolLM2-135M-Instruct.Q4_1.gguf --mlx-path smollm2-135m
  python -m mlx_dflash.convert --hf-path Qwen/Qwen3-4B --mlx-path qwen3-4b-4bit -q
"""
COMMON = {"hf_path", "mlx_path", "dtype", "revision", "check", "upload_repo", "debug"}
QUANTIZATION = {"quantize", "q_bits", "q_group_size", "q_mode", "quant_predicate", "dequantize"}
HONOURED = {
    "draft": COMMON | QUANTIZATION | {"draft_vocab", "draft_vocab_text", "target"},
    "GGUF target": COMMON - {"revision"},
    "target": COMMON | QUANTIZATION | {"trust_remote_code"},
}


def main(argv: list[str] | None = None) -> None:
    """Convert what --hf-path names into the new folder --mlx-path."""
    parser = configure_parser()
    options = parser.parse_args(argv)
    with user_errors(options.debug):
        run(parser, options)


def configure_parser() -> argparse.ArgumentParser:
    """mlx_lm.convert's own parser with --revision, which its function has and its command line lacks, and our flags."""
    parser = importlib.import_module("mlx_lm.convert").configure_parser()
    parser.prog = "mlx_dflash.convert"
    parser.description = "Convert a DFlash draft, a GGUF file, or any model that mlx-lm converts, to an MLX folder."
    parser.formatter_class, parser.epilog = argparse.RawDescriptionHelpFormatter, EXAMPLES
    add = parser.add_argument
    add("--revision", help="Branch, tag or commit of the repository on the hub.")
    add("--check", action="store_true", help="Load the converted model and compare what it computes with its source.")
    add(
        "--draft-vocab",
        type=int,
        metavar="N",
        help="Give the draft an output head of only N of the target's tokens; needs --target.",
    )
    add(
        "--draft-vocab-text",
        metavar="FILE",
        help="Text file whose most frequent tokens --draft-vocab keeps; without it, the first tokens of the tokenizer.",
    )
    add(
        "--target",
        metavar="MODEL",
        help="Target of the draft: a folder, a repository on the hub or 'demo'; --draft-vocab needs its tokenizer.",
    )
    add("--debug", action="store_true", help="Show where in the code an error comes from.")
    return parser


def run(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Convert by the kind of the source. Raises ValueError for a flag that this kind has no use for."""
    if options.hf_path is None:
        raise ValueError("--hf-path is missing: name a folder, a repository on the hub or a .gguf file")
    kind = kind_of(options.hf_path, options.revision)
    for name, value in vars(options).items():
        if name not in HONOURED[kind] and value != parser.get_default(name):
            raise ValueError(f"--{name.replace('_', '-')} does not apply to a {kind}; leave it out")
    # Not after an hour of work.
    quantization = quantization_of(options)
    folder = {"draft": run_draft, "GGUF target": run_gguf, "target": run_target}[kind](options, quantization)
    print(folder)
    if options.upload_repo:
        upload(folder, options.upload_repo)


def kind_of(source: str, revision: str | None) -> str:
    """Say whether a source is a draft, a GGUF target or a target of mlx-lm's."""
    path = local_path(source)
    if path is None:
        if source.endswith(".gguf"):
            return "draft"
        from huggingface_hub import hf_hub_download

        path = Path(from_hub(source, lambda: hf_hub_download(source, "config.json", revision=revision))).parent
    path = file_inside(path)
    if path.is_file():
        return "draft" if gguf_architecture(path) in ARCHITECTURES else "GGUF target"
    return "draft" if is_draft_config(read_config(draft_folder(path))) else "target"


def quantization_of(options: argparse.Namespace) -> Quantization | None:
    """Give what -q asks for, or None. Raises ValueError for sizes without -q, and for -q together with -d."""
    wanted = Quantization(options.q_bits, options.q_group_size, options.q_mode, options.quant_predicate)
    if wanted != Quantization() and not options.quantize:
        raise ValueError(
            "--q-bits, --q-group-size, --q-mode and --quant-predicate go with -q; add it or leave them out"
        )
    if options.quantize and options.dequantize:
        raise ValueError("choose -q or -d, not both")
    return wanted if options.quantize else None


def run_draft(options: argparse.Namespace, quantization: Quantization | None) -> Path:
    """Convert a draft."""
    source = local_path(options.hf_path) or download_draft(options.hf_path, options.revision)
    changes = Changes(options.dtype, quantization, options.dequantize, reduced_vocabulary(options, source))
    folder = convert_draft(source, options.mlx_path, changes, origin_of(options.hf_path, source))
    if options.check:
        from .check import check_draft

        is_exact = quantization is None and options.dtype is None and not options.dequantize
        report(check_draft(folder, source, is_exact))
    return folder


def reduced_vocabulary(options: argparse.Namespace, source: Path) -> list[int] | None:
    """Choose the tokens of --draft-vocab, or None without it."""
    if options.draft_vocab is None:
        if options.draft_vocab_text or options.target:
            raise ValueError("--draft-vocab-text and --target go with --draft-vocab; add it or leave them out")
        return None
    if options.target is None:
        raise ValueError("--draft-vocab needs --target, whose tokenizer says which tokens are special")
    from mlx_dflash.checkpoints.drafts import read_draft
    from mlx_dflash.checkpoints.targets import load_tokenizer
    from mlx_dflash.checkpoints.vocabulary import frequent_tokens
    from mlx_dflash.draft.config import DraftConfig

    text = Path(options.draft_vocab_text).read_text(encoding="utf-8") if options.draft_vocab_text else None
    vocab_size = DraftConfig.from_dict(read_draft(source)[0]).vocab_size
    return frequent_tokens(load_tokenizer(options.target), options.draft_vocab, vocab_size, text)


def run_gguf(options: argparse.Namespace, quantization: None) -> Path:
    """Convert a GGUF target."""
    source = file_inside(local_path(options.hf_path))
    folder = convert_gguf(source, options.mlx_path, options.dtype)
    if options.check:
        from .check import check_gguf

        report(check_gguf(folder, source))
    return folder


def run_target(options: argparse.Namespace, quantization: Quantization | None) -> Path:
    """Let mlx-lm convert a target."""
    more = {name: getattr(options, name) for name in ("dtype", "revision", "dequantize", "trust_remote_code")}
    folder = convert_target(options.hf_path, options.mlx_path, quantization, **more)
    if options.check:
        from .check import check_target

        report(check_target(folder, options.hf_path, options.revision))
    return folder


def report(comparison: object) -> None:
    """Print what --check found."""
    print(f"check: {comparison}")


def upload(folder: Path, repo: str) -> None:
    """Upload a folder to the hub."""
    from huggingface_hub import HfApi

    api = HfApi()
    api.create_repo(repo_id=repo, exist_ok=True)
    api.upload_folder(folder_path=str(folder), repo_id=repo)
    print(f"https://huggingface.co/{repo}")


if __name__ == "__main__":
    main()
