"""The public DFlash draft of each known target, found by the target's name alone.

Matches base names: publisher, case, quantization and format suffixes do not matter, as in mlx-community/Qwen3-4B-4bit
for Qwen/Qwen3-4B. Knows names; loads and downloads nothing.
"""

import re
from pathlib import Path
from typing import Any

from ..demo import DEMO

NO_DRAFT = "none"  # the name of a draft that says: generate without one

# (target, draft), z-lab's DFlash 1 first where a target has two.
PAIRS = [
    ("Qwen/Qwen3-4B", "z-lab/Qwen3-4B-DFlash-b16"),
    ("Qwen/Qwen3-8B", "z-lab/Qwen3-8B-DFlash-b16"),
    ("Qwen/Qwen3-Coder-30B-A3B-Instruct", "z-lab/Qwen3-Coder-30B-A3B-DFlash"),
    ("Qwen/Qwen3-Coder-Next", "z-lab/Qwen3-Coder-Next-DFlash"),
    *(
        (f"Qwen/Qwen3.5-{size}", f"z-lab/Qwen3.5-{size}-DFlash")
        for size in ("4B", "9B", "27B", "35B-A3B", "122B-A10B", "397B-A17B")
    ),
    *((f"Qwen/Qwen3.6-{size}", f"z-lab/Qwen3.6-{size}-DFlash") for size in ("27B", "35B-A3B")),
    ("google/gemma-4-12B-it", "z-lab/gemma4-12B-it-DFlash"),
    *((f"google/gemma-4-{size}-it", f"z-lab/gemma-4-{size}-it-DFlash") for size in ("31B", "26B-A4B")),
    *((f"openai/gpt-oss-{size}", f"z-lab/gpt-oss-{size}-DFlash") for size in ("20b", "120b")),
    ("meta-llama/Llama-3.1-8B-Instruct", "z-lab/LLaMA3.1-8B-Instruct-DFlash-UltraChat"),
    *((f"moonshotai/Kimi-{name}", f"z-lab/Kimi-{name}-DFlash") for name in ("K2.5", "K2.6", "K2.7-Code")),
    *((f"MiniMaxAI/MiniMax-{name}", f"z-lab/MiniMax-{name}-DFlash") for name in ("M2.5", "M2.7")),
    ("zai-org/GLM-5.1", "z-lab/GLM-5.1-DFlash"),
    ("Qwen/Qwen3.8-27B", "z-lab/Qwen3.8-27B-DFlash2"),
    ("Muse-Glimmer-30B", "z-lab/Muse-Glimmer-30B-DFlash2"),
    ("Qwen/Qwen3.8-Flash-Next", "incoai/Qwen3.8-Flash-Next-DFlash2"),
    ("MiniMaxAI/MiniMax-M3.1-Flash", "incoai/MiniMax-M3.1-Flash-DFlash2"),
    ("Ornith-1.5-122B", "incoai/Ornith-1.5-122B-DFlash2"),
    ("zai-org/GLM-5.3-Flash", "incoai/GLM-5.3-Flash-DFlash2"),
    ("zai-org/GLM-5.3", "incoai/GLM-5.3-DFlash2"),
    ("Qwen/Qwen3.6-35B-A3B", "incoai/Qwen3.6-35B-A3B-DFlash2"),
]

# What conversions put behind a base name, in lower case and with hyphens.
_SUFFIX = re.compile(
    r"-(mlx|gguf|gptq|awq|dwq|hqq|fp8|fp16|bf16|fp4|nvfp4|mxfp4|mxfp8|bnb|qat|optiq|unsloth|ud|hf|safetensors|abq"
    r"|\d+(\.\d+)?-?bits?|int[48]|w\d+a\d+|i?q\d(-[k01])?(-[sml]|-x?xs|-nl|-xl)?|g(s|roup)?\d+|mixed(_\d)*|dynamic|quantized|converted|v\d)$"
)


def find_draft(model: str, config: dict[str, Any] | None = None) -> str | None:
    """Return the repository of the draft for a target, or None if no public draft is known for it.

    model: repository or local folder, by whose name it is found; config: its config.json, whose _name_or_path counts
    if the folder's name says nothing. "demo" has the draft "demo". Raises ValueError with the candidates for a name
    that may be, but need not be, a variant of a known target.
    """
    if model == DEMO:
        return DEMO
    names = [_base_name(str(name)) for name in (model, (config or {}).get("_name_or_path")) if name]
    for name in names:
        for target, draft in PAIRS:
            if name == _base_name(target):
                return draft
    similar = [(target, draft) for target, draft in PAIRS if any(_contains(name, _base_name(target)) for name in names)]
    if similar:
        longest = max(len(target) for target, _ in similar)
        listed = ", ".join(f"{draft} (for {target})" for target, draft in similar if len(target) == longest)
        raise ValueError(f"{model} may be a variant of a target with a public draft, which need not fit it: {listed}")
    return None


def _base_name(name: str) -> str:
    """The name without folders, publisher, case, separators and suffixes of conversions."""
    path = Path(name).expanduser()
    parts = [part for part in path.parts if part not in ("/", ".", "..")]
    # The hub's cache: models--OWNER--NAME/snapshots/REVISION.
    cached = [part for part in parts if part.startswith("models--")]
    base = cached[-1].split("--")[-1] if cached else (parts[-1] if parts else name)
    base = base.removesuffix(".gguf").lower().replace("_", "-").replace(" ", "-")
    while (shorter := _SUFFIX.sub("", base)) != base:
        base = shorter
    # Meta's own name of the model has one more word.
    return base.removeprefix("meta-").replace("gemma4", "gemma-4").replace("llama3", "llama-3")


def _contains(name: str, base: str) -> bool:
    """Whether the words of base stand in name one behind the other."""
    return f"-{base}-" in f"-{name}-"
