"""What this machine and this pair can do, on one screen; every mismatch with its cure.

`python -m mlx_dflash.doctor [--model NAME] [--draft-model NAME] [--json]`. Exit status 0: all is well; 1: something
does not fit; 2: wrong flags. Reads configurations and the headers of weight files; it downloads no weights, and
computes nothing with them.
"""

import argparse
import json
import os
import platform
import sys
from dataclasses import asdict, dataclass, field
from importlib import metadata, util
from pathlib import Path
from typing import Any

import mlx.core as mx

from .checkpoints.known_pairs import find_draft
from .checkpoints.layouts import tap_numbering, zlab_layout
from .draft.config import DraftConfig
from .files.hub import draft_folder, local_path
from .files.safetensors import is_draft_config, read_config

_ERRORS = (ValueError, TypeError, KeyError, OSError)


@dataclass(frozen=True)
class Finding:
    """One line: kind is "ok", "note" or "fault"; cure says what to do, where there is something to do."""

    kind: str
    text: str
    cure: str = ""


@dataclass
class Report:
    """Findings, in order, and the facts behind them by subject."""

    findings: list[Finding] = field(default_factory=list)
    facts: dict[str, dict[str, Any]] = field(default_factory=dict)

    def add(self, kind: str, text: str, cure: str = "") -> None:
        self.findings.append(Finding(kind, text, cure))

    @property
    def is_well(self) -> bool:
        return all(finding.kind != "fault" for finding in self.findings)


@dataclass(frozen=True)
class Source:
    """A model as far as it is known without its weights. path: local folder or file, None for one on the hub."""

    name: str
    path: Path | None
    config: dict[str, Any]
    num_bytes: int | None


def main(argv: list[str] | None = None) -> None:
    """Examine what the flags name and print the report."""
    parser = argparse.ArgumentParser(
        prog="mlx_dflash.doctor", description="Say what this machine and this pair can do."
    )
    parser.add_argument(
        "--model", help="target: a folder or hub repository (default: the demo's, where --draft-model is not given)"
    )
    parser.add_argument("--draft-model", help="DFlash draft (default: the target's public one)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of lines")
    args = parser.parse_args(argv)
    report = examine(args.model, args.draft_model)
    print(as_json(report) if args.json else as_text(report))
    sys.exit(0 if report.is_well else 1)


def examine(model: str | None, draft_model: str | None) -> Report:
    """Examine the machine, the target, the draft and how they fit; None where nothing is named."""
    report = Report()
    _machine(report)
    if model is None and draft_model is None:
        model = "demo"
    target = _target(report, model) if model else None
    draft_name = draft_model or (_public_draft(report, model, target) if model else None)
    draft = _draft(report, draft_name) if draft_name else None
    if target and draft:
        _pair(report, target, draft)
    _memory(report, ([target.num_bytes] if target else []) + ([_bytes_in_memory(*draft)] if draft else []))
    return report


def as_text(report: Report) -> str:
    """One line a finding, the cure below it."""
    marks = {"ok": " ok ", "note": "note", "fault": " !! "}
    lines = []
    for finding in report.findings:
        lines.append(f"[{marks[finding.kind]}] {finding.text}")
        if finding.cure:
            lines.append(f"        -> {finding.cure}")
    return "\n".join(lines)


def as_json(report: Report) -> str:
    """An object with ok, findings and facts."""
    content = {"ok": report.is_well, "findings": [asdict(f) for f in report.findings], "facts": report.facts}
    return json.dumps(content, indent=2)


def _machine(report: Report) -> None:
    versions = {name: _version(name) for name in ("mlx", "mlx-lm", "numpy", "huggingface-hub")}
    device, has_metal = mx.default_device(), mx.metal.is_available()
    report.facts["machine"] = {
        "platform": platform.platform(),
        "python": platform.python_version(),
        "versions": versions,
        "device": str(device.type).rpartition(".")[2],
        "has_metal": has_metal,
        "memory_bytes": _memory_bytes(),
    }
    report.add(
        "ok",
        f"{platform.system()} {platform.machine()}, Python {platform.python_version()}, "
        + ", ".join(f"{n} {v}" for n, v in versions.items()),
    )
    if has_metal:
        report.add("ok", f"GPU: {mx.device_info().get('device_name', 'Metal')}, {_gb(_memory_bytes())} for models")
    else:
        report.add(
            "note",
            f"no Metal GPU here: everything runs on {report.facts['machine']['device']}, {_gb(_memory_bytes())} of memory",
        )
    if sys.platform == "linux" and device.type == mx.DeviceType.cpu and not _has_fast_blas():
        report.add(
            "note",
            "neither BLIS nor OpenBLAS is loaded, so the CPU is 10 to 40 times slower than it could be",
            "apt-get install libblis4-openmp",
        )
    if util.find_spec("gguf") is None:
        report.add("note", "GGUF files with k-quants cannot be read", "pip install gguf")


def _target(report: Report, name: str) -> Source | None:
    try:
        source = _source(name, is_draft=False)
        if is_draft_config(source.config):
            report.add(
                "fault", f"target {name}: this is a DFlash draft", "pass it as --draft-model, and its target as --model"
            )
            return None
        text = source.config.get("text_config") or source.config
        facts = {
            "model_type": source.config.get("model_type"),
            "num_layers": text.get("num_hidden_layers"),
            "hidden_size": text.get("hidden_size"),
            "vocab_size": text.get("vocab_size"),
            "quantization": source.config.get("quantization"),
            "bytes": source.num_bytes,
        }
        report.facts["target"] = facts
        _check_target_class(source.config)
    except _ERRORS as error:
        report.add("fault", f"target {name}: {error}")
        return None
    report.add(
        "ok",
        f"target {name}: {facts['model_type']}, {facts['num_layers']} layers, {_packing(facts['quantization'])}, {_gb(source.num_bytes)}",
    )
    return source


def _check_target_class(config: dict[str, Any]) -> None:
    """Build the model without weights and look whether its caches can roll back. Raises ValueError if not."""
    from mlx_lm.models.cache import make_prompt_cache
    from mlx_lm.utils import _get_classes

    from .caches import rollback
    from .target import Structure

    model_class, arguments = _get_classes(config)
    model = model_class(arguments.from_dict(config))
    Structure(model)
    rollback.adopt(make_prompt_cache(model), slack=16)


def _public_draft(report: Report, name: str, target: Source | None) -> str | None:
    try:
        draft = find_draft(name, target.config if target else None)
    except ValueError as error:
        report.add("fault", str(error), "pass the draft that was trained for this target as --draft-model")
        return None
    if draft is None:
        report.add(
            "fault",
            f"no public DFlash draft is known for {name}",
            "pass one as --draft-model, or --draft-model none to generate without",
        )
    return draft


def _draft(report: Report, name: str) -> tuple[Source, DraftConfig] | None:
    try:
        source = _source(name, is_draft=True)
        if not is_draft_config(source.config):
            report.add(
                "fault",
                f"draft {name}: a {source.config.get('model_type')} model, not a DFlash draft",
                "pass it as --model",
            )
            return None
        if source.path is not None:
            from .checkpoints.drafts import build_draft, read_draft

            config = build_draft(*read_draft(source.path), source.path).config
        else:
            config = DraftConfig.from_dict(zlab_layout(source.config))
    except _ERRORS as error:
        report.add("fault", f"draft {name}: {error}")
        return None
    report.facts["draft"] = {
        **asdict(config),
        "version": config.version,
        "num_drafts": config.num_drafts,
        "bytes": source.num_bytes,
    }
    kinds = {"full_attention": "full", "sliding_attention": f"sliding {config.sliding_window}"}
    layers = ", ".join(
        f"{config.layer_types.count(kind)} {word}" for kind, word in kinds.items() if kind in config.layer_types
    )
    report.add(
        "ok",
        f"draft {name}: DFlash {config.version}, {config.num_layers} layers ({layers}), block {config.block_size} = "
        f"{config.num_drafts} drafts, {_packing(config.quantization)}, {_gb(source.num_bytes)}",
    )
    report.add(
        "ok",
        f"taps layers {', '.join(map(str, config.target_layer_ids))} of its target ({tap_numbering(source.config)})",
    )
    return source, config


def _pair(report: Report, target: Source, draft: tuple[Source, DraftConfig]) -> None:
    text, config, before = target.config.get("text_config") or target.config, draft[1], len(report.findings)
    other = "this draft was trained for another target; pass the right one"
    num_layers, hidden_size, vocab_size = (text.get(k) for k in ("num_hidden_layers", "hidden_size", "vocab_size"))
    if config.num_target_layers not in (None, num_layers):
        report.add("fault", f"the draft's target has {config.num_target_layers} layers, this one {num_layers}", other)
    elif num_layers is not None and max(config.target_layer_ids) >= num_layers:
        report.add(
            "fault",
            f"the draft taps layer {max(config.target_layer_ids)}, the target's last is {num_layers - 1}",
            other,
        )
    if hidden_size is not None and config.target_hidden_size != hidden_size:
        report.add(
            "fault",
            f"the draft reads hidden states of width {config.target_hidden_size}, the target's have {hidden_size}",
            other,
        )
    if vocab_size is not None and config.vocab_size != vocab_size:
        report.add("fault", f"the draft has {config.vocab_size} tokens, the target {vocab_size}", other)
    if len(report.findings) == before:
        report.add("ok", "target and draft fit: layers, hidden size and vocabulary agree")


def _bytes_in_memory(source: Source, config: DraftConfig) -> int | None:
    """What a draft takes when it is loaded: on the CPU a quantized one is unpacked to 32 bits a weight."""
    if source.num_bytes is None or not config.quantization or mx.default_device().type != mx.DeviceType.cpu:
        return source.num_bytes
    return source.num_bytes * 32 // config.quantization["bits"]


def _memory(report: Report, sizes: list[int | None]) -> None:
    if not sizes or None in sizes:
        return
    needed, available = sum(sizes), _memory_bytes()
    report.facts["memory"] = {"needed_bytes": needed, "available_bytes": available}
    if needed > available:
        report.add(
            "fault",
            f"the weights take {_gb(needed)}, there are {_gb(available)}",
            "take a target of fewer bits: python -m mlx_dflash.convert ... -q",
        )
    elif needed > 0.8 * available:
        report.add(
            "note", f"the weights take {_gb(needed)} of {_gb(available)}: there is little room for long contexts"
        )
    else:
        report.add("ok", f"the weights take {_gb(needed)} of {_gb(available)}")


def _source(name: str, is_draft: bool) -> Source:
    """Find the configuration and the size of a model. Raises ValueError or OSError if there is none."""
    path = _demo_path(is_draft) if name == "demo" else local_path(name)
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
    from huggingface_hub import HfApi, hf_hub_download

    from .files.hub import from_hub

    config = from_hub(name, lambda: hf_hub_download(name, "config.json"))
    try:
        files = HfApi().model_info(name, files_metadata=True).siblings or []
    except (OSError, ValueError):
        return Source(name, None, read_config(Path(config).parent), None)
    sizes = [file.size for file in files if file.rfilename.endswith(".safetensors") and file.size]
    return Source(name, None, read_config(Path(config).parent), sum(sizes) or None)


def _demo_path(is_draft: bool) -> Path:
    from . import demo

    return demo.draft_path() if is_draft else demo.target_path()


def _memory_bytes() -> int:
    """Memory that models may take, in bytes: the GPU's working set, or this machine's memory."""
    if mx.metal.is_available():
        return int(mx.device_info()["max_recommended_working_set_size"])
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _has_fast_blas() -> bool:
    maps = Path("/proc/self/maps")
    loaded = maps.read_text() if maps.exists() else None
    return loaded is None or "libblis" in loaded or "openblas" in loaded


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _packing(quantization: dict[str, Any] | None) -> str:
    return f"{quantization.get('bits')} bits" if quantization else "not quantized"


def _gb(num_bytes: int | None) -> str:
    return "size unknown" if num_bytes is None else f"{num_bytes / 1e9:.2f} GB"


if __name__ == "__main__":
    main()
