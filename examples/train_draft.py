"""Train a small draft from nothing in two minutes, and see what it is worth. Run: python examples/train_draft.py

A real draft wants thousands of prompts and hours (see docs/training.md); the steps are the same.
"""

import json
import tempfile
from pathlib import Path

from mlx_dflash.train import DataOptions, FitOptions, fit, write_data

TARGET = "demo"  # or any model of mlx-lm: a folder or a hub repository

PROMPTS = [f"Count from {n} to {n + 9}." for n in (1, 5, 11, 20, 31, 42, 50, 60)] + [
    "List the days of the week.",
    "List the months of the year.",
]

with tempfile.TemporaryDirectory() as folder:
    prompts, data, run = (Path(folder) / name for name in ("prompts.jsonl", "data.jsonl", "run"))
    prompts.write_text("".join(json.dumps({"class": "counting", "prompt": text}) + "\n" for text in PROMPTS))

    # The target answers the prompts: a draft learns to foresee this very target.
    write_data(DataOptions(model=TARGET, prompts=prompts, out=data, max_tokens=40, sampled_share=0.0))

    # One layer, copied from the target's last; two of the answers are not learned but measured.
    options = FitOptions(
        model=TARGET,
        data=[data],
        out=run,
        size="tiny",
        loss_vocab=2048,
        steps=40,
        warmup=5,
        batch_size=2,
        save_every=10,
        valid_every=20,
        valid_count=2,
        valid_tokens=40,
    )
    best, last = fit(options)

    # What remains is an ordinary draft folder: load_draft(best).
    print((best / "README.md").read_text())
