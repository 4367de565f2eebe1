"""Every example runs, as a user would run it."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.process

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


@pytest.mark.demo
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.stem)
def test_example_runs(path):
    done = subprocess.run([sys.executable, str(path)], cwd=ROOT, env=None, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
