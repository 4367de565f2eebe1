"""The command `python -m mlx_dflash.doctor`: what this machine and this pair can do, on one screen.

Every mismatch is a finding with its cure. Reads configurations and the headers of weight files; it downloads no
weights, and computes nothing with them. Exit status 0: all is well; 1: something does not fit; 2: wrong flags.
"""

import argparse
import json
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import mlx.core as mx

from .checkpoints.known_pairs import NO_DRAFT, find_draft
from .checkpoints.layouts import tap_numbering, zlab_layout
from .checkpoints.packing import is_unpacked_here
from .commands.errors import Parser, run_command
from .commands.machine import Machine, this_machine
from .demo import DEMO, local_draft, local_target
from .draft.config import DraftConfig
from .files.hub import draft_folder
from .files.safetensors import is_draft_config, read_config
from .models.structure import Structure, check_layer_ids
from .pair import mismatches

_ERRORS = (ValueError, TypeError, KeyError, OSError)
_MARKS = {"ok": " ok ", "note": "note", "fault": " !! "}


@dataclass(frozen=True)
class Finding:
    """One thing that is said: kind is "ok", "note" or "fault"; cure says what to do about it, or is empty."""

    kind: str
    text: str
    cure: str = ""


@dataclass
class Report:
    """The findings in their order, and the facts that they rest on, by subject."""

    findings: list[Finding] = field(default_factory=list)
    facts: dict[str, dict[str, Any]] = field(default_factory=dict)

    def add(self, kind: str, text: str, cure: str = "") -> None:
        """Add a finding."""
        self.findings.append(Finding(kind, text, cure))

    @property
    def is_well(self) -> bool:
        """Whether nothing is a fault."""
        return all(finding.kind != "fault" for finding in self.findings)


@dataclass(frozen=True)
class Source:
    """A model as far as it is known without its weights.

    path: local folder or file, None for one on the hub. num_bytes: of its weight files, None if unknown.
    """

    name: str
    path: Path | None
    config: dict[str, Any]
    num_bytes: int | None


@dataclass(frozen=True)
class ExaminedTarget:
    """A target whose class was built without weights, so that its structure is known."""

    source: Source
    structure: Structure

    @property
    def hidden_size(self) -> int | None:
        """Width of the hidden states by the configuration, None if it does not say."""
        return _text_config(self.source.config).get("hidden_size")


@dataclass(frozen=True)
class ExaminedDraft:
    """A draft whose configuration was read and, if it is on this machine, compared with its tensors' shapes."""

    source: Source
    config: DraftConfig

    @property
    def num_bytes(self) -> int | None:
        """Bytes in memory once it is loaded: on the CPU a quantized draft is unpacked to 32 bits a weight."""
        quantization, num_bytes = self.config.quantization, self.source.num_bytes
        if num_bytes is None or not quantization or not is_unpacked_here():
            return num_bytes
        return num_bytes * 32 // quantization["bits"]


def main(argv: list[str] | None = None) -> None:
    """Examine what the flags name, print the report, and exit with its status."""
    run_command(make_parser, _run, argv)


def make_parser() -> Parser:
    """Return a parser of the flags of the doctor."""
    parser = Parser(
        prog="mlx_dflash.doctor",
        description="Say what this machine can do, and whether a target and a draft fit it and each other.",
    )
    parser.add_argument(
        "--model", help="target: a folder or hub repository (default: the demo's, unless --draft-model is given)"
    )
    parser.add_argument(
        "--draft-model",
        help="DFlash draft: a folder, a .gguf file or a hub repository, or 'none' to examine a target alone "
        "(default: the public draft of the target)",
    )
    parser.add_argument("--json", action="store_true", help="print the findings and their facts as one JSON object")
    return parser


def _run(args: argparse.Namespace) -> int:
    report = examine(args.model, args.draft_model)
    print(as_json(report) if args.json else as_text(report))
    return 0 if report.is_well else 1


def examine(model: str | None, draft_model: str | None) -> Report:
    """Examine the machine, the target, the draft and whether they fit; None where nothing is named."""
    report, machine = Report(), this_machine()
    _describe_machine(report, machine)
    if model is None and draft_model in (None, NO_DRAFT):
        model = DEMO
    target = _examine_target(report, model) if model else None
    draft_name = draft_model or (_public_draft(report, model, target) if model else None)
    draft = _examine_draft(report, draft_name) if draft_name and draft_name != NO_DRAFT else None
    if target and draft:
        _compare(report, target, draft)
    sizes = ([target.source.num_bytes] if target else []) + ([draft.num_bytes] if draft else [])
    _weigh(report, sizes, machine.memory_bytes)
    return report


def as_text(report: Report) -> str:
    """Write a report for people: one line a finding, its cure below it."""
    lines = []
    for finding in report.findings:
        lines.append(f"[{_MARKS[finding.kind]}] {finding.text}")
        if finding.cure:
            lines.append(f"        -> {finding.cure}")
    return "\n".join(lines)


def as_json(report: Report) -> str:
    """Write a report as a JSON object with ok, findings and facts."""
    content = {"ok": report.is_well, "findings": [asdict(f) for f in report.findings], "facts": report.facts}
    return json.dumps(content, indent=2)


def _describe_machine(report: Report, machine: Machine) -> None:
    report.facts["machine"] = asdict(machine)
    versions = ", ".join(f"{name} {version}" for name, version in machine.versions.items())
    report.add("ok", f"{machine.system} {machine.processor}, Python {machine.python}, {versions}")
    memory = _gb(machine.memory_bytes)
    if machine.has_metal:
        report.add("ok", f"GPU: {machine.chip or 'Metal'}, {memory} of memory for models")
    else:
        report.add("note", f"there is no Metal GPU: everything runs on the {machine.device}, with {memory} of memory")
    if machine.system == "Linux" and machine.device == "cpu":
        if machine.blas is None:
            report.add(
                "note",
                "MLX multiplies with its own BLAS on this CPU; BLIS or OpenBLAS would be 10 to 40 times faster",
                "apt-get install libblis4-openmp",
            )
        else:
            report.add("ok", f"matrix products on the CPU run in {machine.blas}")
    if find_spec("gguf") is None:
        report.add("note", "GGUF files with k-quants cannot be read", "pip install gguf")


def _examine_target(report: Report, name: str) -> ExaminedTarget | None:
    try:
        source = _source(name, is_draft=False)
        if is_draft_config(source.config):
            cure = "pass it as --draft-model, and its target as --model"
            report.add("fault", f"target {name}: this is a DFlash draft", cure)
            return None
        text, quantization = _text_config(source.config), source.config.get("quantization")
        report.facts["target"] = {
            "model_type": source.config.get("model_type"),
            "num_layers": text.get("num_hidden_layers"),
            "hidden_size": text.get("hidden_size"),
            "vocab_size": text.get("vocab_size"),
            "quantization": quantization,
            "bytes": source.num_bytes,
        }
        structure = _build_target(source.config)
    except _ERRORS as error:
        report.add("fault", f"target {name}: {error}")
        return None
    report.add(
        "ok",
        f"target {name}: {source.config['model_type']}, {len(structure.layers)} layers, {_packing(quantization)}, "
        f"{_gb(source.num_bytes)}",
    )
    return ExaminedTarget(source, structure)


def _build_target(config: dict[str, Any]) -> Structure:
    """Build the model without weights and return its structure.

    Raises ValueError if mlx-lm does not know the model, or if its caches cannot go back.
    """
    from mlx_lm.models.cache import make_prompt_cache
    from mlx_lm.utils import _get_classes

    from .caches import rollback

    model_class, arguments = _get_classes(config)
    model = model_class(arguments.from_dict(config))
    structure = Structure(model)
    rollback.adopt(make_prompt_cache(model), slack=16)
    return structure


def _public_draft(report: Report, name: str, target: ExaminedTarget | None) -> str | None:
    try:
        draft = find_draft(name, target.source.config if target else None)
    except ValueError as error:
        report.add("fault", str(error), "pass the draft that was trained for this target as --draft-model")
        return None
    if draft is None:
        cure = f"pass a draft as --draft-model, or --draft-model {NO_DRAFT} to generate without one"
        report.add("fault", f"no public DFlash draft is known for {name}", cure)
    return draft


def _examine_draft(report: Report, name: str) -> ExaminedDraft | None:
    try:
        source = _source(name, is_draft=True)
        if not is_draft_config(source.config):
            kind = source.config.get("model_type")
            report.add("fault", f"draft {name}: a {kind} model, not a DFlash draft", "pass it as --model")
            return None
        config = _draft_config(source)
    except _ERRORS as error:
        report.add("fault", f"draft {name}: {error}")
        return None
    counts = {"version": config.version, "num_drafts": config.num_drafts, "bytes": source.num_bytes}
    report.facts["draft"] = asdict(config) | counts
    kinds = {"full_attention": "full", "sliding_attention": f"sliding {config.sliding_window}"}
    layers = ", ".join(
        f"{config.layer_types.count(kind)} {word}" for kind, word in kinds.items() if kind in config.layer_types
    )
    report.add(
        "ok",
        f"draft {name}: DFlash {config.version}, {config.num_layers} layers ({layers}), block {config.block_size} = "
        f"{config.num_drafts} drafts, {_packing(config.quantization)}, {_gb(source.num_bytes)}",
    )
    taps = ", ".join(map(str, config.target_layer_ids))
    report.add("ok", f"the draft taps layers {taps} of its target ({tap_numbering(source.config)})")
    return ExaminedDraft(source, config)


def _draft_config(source: Source) -> DraftConfig:
    """Return the draft's configuration; raise ValueError if the tensors of a local draft do not have its shapes."""
    if source.path is None:
        return DraftConfig.from_dict(zlab_layout(source.config))
    from .checkpoints.drafts import build_draft, read_draft

    return build_draft(*read_draft(source.path), source.path).config


def _compare(report: Report, target: ExaminedTarget, draft: ExaminedDraft) -> None:
    """Add a fault for everything that does not fit between target and draft."""
    config, structure = draft.config, target.structure
    borrows = not (config.has_own_embedding and config.has_own_head)
    width = structure.embed(mx.array([[0]])).shape[-1] if borrows else None
    found = mismatches(config, len(structure.layers), width, structure.vocab_size)
    if config.target_hidden_size != (target.hidden_size or config.target_hidden_size):
        found.append(
            f"the draft expects hidden states of width {config.target_hidden_size}, the target's layers give "
            f"{target.hidden_size}"
        )
    try:
        check_layer_ids(config.target_layer_ids, len(structure.layers))
    except ValueError as error:
        found.append(str(error))
    for text in found:
        report.add("fault", text, "this draft was trained for another target; pass the right one as --draft-model")
    if not found:
        report.add("ok", "target and draft fit: layers, hidden size and vocabulary agree")


def _weigh(report: Report, sizes: list[int | None], available: int) -> None:
    """Compare the bytes of all weights with those of the memory; say nothing if one is unknown."""
    known = [size for size in sizes if size is not None]
    if not sizes or len(known) < len(sizes):
        return
    needed = sum(known)
    report.facts["memory"] = {"needed_bytes": needed, "available_bytes": available}
    text = f"the weights take {_gb(needed)} of {_gb(available)}"
    if needed > available:
        report.add("fault", text, "take a target of fewer bits: python -m mlx_dflash.convert ... -q")
    elif needed > 0.8 * available:
        report.add("note", f"{text}: there is little room for long contexts")
    else:
        report.add("ok", text)


def _source(name: str, is_draft: bool) -> Source:
    """Find the configuration and the size of a model.

    Raises ValueError or OSError if there is none.
    """
    path = local_draft(name) if is_draft else local_target(name)
    if path is None:
        return _hub_source(name)
    if path.is_file() or not (path / "config.json").is_file() and list(path.glob("*.gguf")):
        if not is_draft:
            raise ValueError(
                f"a GGUF file; convert it first: python -m mlx_dflash.convert --hf-path {path} --mlx-path FOLDER"
            )
        from .checkpoints.drafts import read_draft

        files = [path] if path.is_file() else list(path.glob("*.gguf"))
        return Source(name, path, read_draft(path)[0], sum(file.stat().st_size for file in files))
    path = draft_folder(path) if is_draft else path
    sizes = [file.stat().st_size for file in path.glob("*.safetensors")]
    if not sizes:
        raise ValueError(f"{path} has no safetensors files")
    return Source(name, path, read_config(path), sum(sizes))


def _hub_source(name: str) -> Source:
    """Ask the hub for a model's configuration and for the sizes of its files."""
    from huggingface_hub import HfApi, hf_hub_download

    from .files.hub import from_hub

    config = from_hub(name, lambda: hf_hub_download(name, "config.json"))
    try:
        files = HfApi().model_info(name, files_metadata=True).siblings or []
    except (OSError, ValueError):
        return Source(name, None, read_config(Path(config).parent), None)
    sizes = [file.size for file in files if file.rfilename.endswith(".safetensors") and file.size]
    return Source(name, None, read_config(Path(config).parent), sum(sizes) or None)


def _text_config(config: dict[str, Any]) -> dict[str, Any]:
    return config.get("text_config") or config


def _packing(quantization: dict[str, Any] | None) -> str:
    return f"{quantization.get('bits')} bits" if quantization else "not quantized"


def _gb(num_bytes: int | None) -> str:
    return "size unknown" if num_bytes is None else f"{num_bytes / 1e9:.2f} GB"


if __name__ == "__main__":
    main()
