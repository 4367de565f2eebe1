"""Fine-tune a draft to a folder of source files. Run: python examples/fine_tune_draft.py [FOLDER]"""

import sys
import tempfile
from pathlib import Path

from mlx_dflash.train import DataOptions, FitOptions, fit, write_data

TARGET, DRAFT = "demo", "demo"  # or a target and its draft: folders or hub repositories
folder = sys.argv[1] if len(sys.argv) > 1 else str(Path(__file__).parent)

with tempfile.TemporaryDirectory() as work:
    data, run = Path(work) / "data.jsonl", Path(work) / "run"

    # The text as it is; to learn what the target would write about it instead, give prompts: see `train data --help`.
    write_data(DataOptions(model=TARGET, text=folder, out=data, max_length=256))

    # Go on from the given draft, gently. Give --valid-data to see its acceptance on text of your own.
    options = FitOptions(
        model=TARGET,
        data=[data],
        out=run,
        init_draft=DRAFT,
        learning_rate=1e-4,
        steps=10,
        warmup=2,
        batch_size=1,
        save_every=5,
        valid_count=0,
    )
    (draft,) = fit(options)

    print(*sorted(path.name for path in draft.iterdir()), sep="\n")
