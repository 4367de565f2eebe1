"""A tiny target with prompts and its answers, and the steps of training on them, for the tests of training."""

import json
from pathlib import Path

import pytest

from mlx_dflash.train.__main__ import main
from support.byte_tokenizer import byte_tokenizer
from support.folders import save_target
from support.targets import build_target, target_config

CONFIG = target_config("qwen3", vocab_size=258)
WORDS = "one two three four five six seven eight nine ten".split()


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a target, prompts and the target's answers."""
    folder = tmp_path_factory.mktemp("train")
    save_target(folder / "target", build_target(CONFIG), CONFIG, byte_tokenizer())
    (folder / "prompts.txt").write_text("".join(f"say {word}\n" for word in WORDS))
    data(folder)
    return folder


def data(folder, *more, out="data.jsonl"):
    main(
        [
            "data",
            "--model",
            str(folder / "target"),
            "--prompts",
            str(folder / "prompts.txt"),
            "--out",
            str(folder / out),
            "--max-tokens",
            "24",
            *more,
        ]
    )


def fit_arguments(folder, out, **changes):
    flags = {
        "warmup": max(0, min(3, (changes.get("steps") or 12) - 1)),
        "model": folder / "target",
        "data": folder / "data.jsonl",
        "out": out,
        "size": "tiny",
        "block-size": 4,
        "steps": 12,
        "save-every": 4,
        "valid-every": 6,
        "valid-count": 2,
        "anchors": 8,
        "batch-size": 2,
        "feature-dtype": "float32",
    } | {key.replace("_", "-"): value for key, value in changes.items()}
    return ["fit", *(text for key, value in flags.items() if value is not None for text in (f"--{key}", str(value)))]


def fit(folder, out, **changes):
    main(fit_arguments(folder, out, **changes))


def losses(folder):
    return [
        (line["step"], line["loss"])
        for line in map(json.loads, (Path(folder) / "log.jsonl").read_text().splitlines())
        if "loss" in line
    ]
