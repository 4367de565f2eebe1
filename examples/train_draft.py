"""Train a small draft from nothing in two minutes, and see what it is worth. Run: python examples/train_draft.py

A real draft wants thousands of prompts and hours (see README, "Train a draft"); the steps are the same.
"""

import json
import tempfile
from pathlib import Path

from mlx_dflash.train.__main__ import main as train

TARGET = "demo"  # or any model of mlx-lm: a folder or a hub repository

PROMPTS = [f"Count from {n} to {n + 9}." for n in (1, 5, 11, 20, 31, 42, 50, 60)] + [
    "List the days of the week.",
    "List the months of the year.",
]

with tempfile.TemporaryDirectory() as folder:
    prompts, data, run = (Path(folder) / name for name in ("prompts.jsonl", "data.jsonl", "run"))
    prompts.write_text("".join(json.dumps({"class": "counting", "prompt": text}) + "\n" for text in PROMPTS))

    # The target answers the prompts: a draft learns to foresee this very target.
    train(
        [
            "data",
            "--model",
            TARGET,
            "--prompts",
            str(prompts),
            "--out",
            str(data),
            "--max-tokens",
            "40",
            "--sampled-share",
            "0",
        ]
    )

    # One layer, copied from the target's last; two of the answers are not learned but measured.
    train(
        [
            "fit",
            "--model",
            TARGET,
            "--data",
            str(data),
            "--out",
            str(run),
            "--size",
            "tiny",
            "--loss-vocab",
            "2048",
            "--steps",
            "40",
            "--warmup",
            "5",
            "--save-every",
            "10",
            "--valid-every",
            "20",
            "--valid-count",
            "2",
            "--valid-tokens",
            "40",
            "--batch-size",
            "2",
        ]
    )

    # What remains is an ordinary draft folder: load_draft(run / "best").
    print((run / "best" / "README.md").read_text())
