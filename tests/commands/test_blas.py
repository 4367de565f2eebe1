"""Which BLAS the package loads before MLX, and with how many threads."""

import ctypes
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from mlx_dflash import blas


@pytest.fixture
def system(monkeypatch):
    """A Linux machine of 4 cores.

    installed: libraries, each with whether it is a build for OpenMP. environment: threads that the environment asks
    for. threads: those that were set.
    """
    system = SimpleNamespace(installed={}, asked=[], environment=-1, threads=None)

    def load(name, mode):
        assert mode == ctypes.RTLD_GLOBAL
        system.asked.append(name)
        if name not in system.installed:
            raise OSError(name)
        return SimpleNamespace(
            bli_info_get_enable_openmp=lambda: int(system.installed[name]),
            bli_thread_get_num_threads=lambda: system.environment,
            bli_thread_set_num_threads=lambda count: setattr(system, "threads", count.value),
        )

    monkeypatch.setattr(blas.ctypes, "CDLL", load)
    monkeypatch.setattr(blas.sys, "platform", "linux")
    monkeypatch.delitem(sys.modules, "mlx.core")
    monkeypatch.setattr(blas.os, "sched_getaffinity", lambda pid: set(range(4)), raising=False)
    return system


def test_blis_comes_before_openblas_and_uses_the_cores(system):
    system.installed = {"libblis.so.4": True, "libopenblas.so.0": None}
    assert blas.load_blas()
    assert system.asked == ["libblis.so.4"] and system.threads == 4


def test_few_threads_on_a_machine_of_many_cores(system, monkeypatch):
    system.installed = {"libblis.so.4": True}
    monkeypatch.setattr(blas.os, "sched_getaffinity", lambda pid: set(range(64)), raising=False)
    assert blas.load_blas() and system.threads == 8


def test_blis_that_starts_threads_anew_keeps_to_one(system):
    system.installed = {"libblis.so.4": False}
    assert blas.load_blas() and system.threads is None


def test_the_environment_decides_about_threads(system):
    system.installed, system.environment = {"libblis.so.4": True}, 3
    assert blas.load_blas() and system.threads is None


def test_openblas_where_there_is_no_blis(system):
    system.installed = {"libopenblas.so.0": None}
    assert blas.load_blas()
    assert system.asked[-1] == "libopenblas.so.0" and system.threads is None


def test_the_mkl_of_the_environment_where_the_system_has_nothing(system, monkeypatch, tmp_path):
    monkeypatch.setattr(blas.sys, "prefix", str(tmp_path))
    mkl = str(tmp_path / "lib" / "libmkl_rt.so.2")
    system.installed = {mkl: None}
    assert blas.load_blas() and system.asked[-1] == mkl and system.threads is None
    assert system.asked.index("libopenblas.so.0") < len(system.asked) - 1


@pytest.mark.skipif(sys.platform != "linux", reason="other systems bring their own BLAS")
@pytest.mark.parametrize("found, is_told", [(None, True), ("libblis.so.4", False)])
def test_a_machine_without_a_fast_blas_is_told_what_to_install_once(monkeypatch, capsys, found, is_told):
    import argparse

    from mlx_dflash.commands.loading import load_pair

    monkeypatch.setattr(blas, "blas_in_use", lambda: found)
    monkeypatch.setattr(blas.sys, "platform", "linux")
    names = dict(model="/nonexistent", draft_model="none", adapter_path=None, extra_eos_token=())
    args = argparse.Namespace(**names, trust_remote_code=False, quantize_activations=False)
    with pytest.raises((ValueError, OSError)):
        load_pair(args)
    said = capsys.readouterr().err
    assert said.count("\n") == is_told and ("libblis4-openmp" in said and "pip install mkl" in said) == is_told


def test_nothing_is_loaded_where_none_is_installed_or_it_would_be_too_late(system, monkeypatch):
    assert not blas.load_blas()
    system.installed = {"libblis.so.4": True}
    monkeypatch.setitem(sys.modules, "mlx.core", object())
    assert not blas.load_blas()
    monkeypatch.delitem(sys.modules, "mlx.core")
    monkeypatch.setattr(blas.sys, "platform", "darwin")
    assert not blas.load_blas() and system.threads is None


@pytest.mark.parametrize(
    ["environment", "threads"],
    [({}, min(len(os.sched_getaffinity(0)), 8)), ({"BLIS_NUM_THREADS": "3"}, 3)] if sys.platform == "linux" else [],
)
def test_threads_of_the_real_blis(environment, threads):
    code = (
        "import ctypes, mlx_dflash\n"
        "blis = ctypes.CDLL(None)\n"
        "is_for_openmp = hasattr(blis, 'bli_info_get_enable_openmp') and blis.bli_info_get_enable_openmp()\n"
        "print(blis.bli_thread_get_num_threads() if is_for_openmp else 'absent')"
    )
    kept = {name: value for name, value in os.environ.items() if name not in ("BLIS_NUM_THREADS", "OMP_NUM_THREADS")}
    run = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={**kept, "PYTHONPATH": os.getcwd(), **environment},
    )
    if run.stdout.strip() == "absent":
        pytest.skip("BLIS for OpenMP is not installed")
    assert run.returncode == 0 and int(run.stdout) == threads, run.stdout + run.stderr


def blas_in_use_after(imports):
    """What a new process finds that has made these imports."""
    code = f"{imports}\nfrom mlx_dflash.blas import blas_in_use; print(blas_in_use())"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def test_the_blas_in_use_is_the_one_that_was_loaded():
    code = "from mlx_dflash import blas; print(blas.load_blas())"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    found = blas_in_use_after("import mlx_dflash, numpy, mlx.core")
    assert (found.startswith(("libblis", "libopenblas"))) == (loaded == "True"), found


def test_the_blas_that_numpy_brings_for_itself_is_not_taken_for_ours():
    """MLX is imported first, so that no other BLAS is loaded; numpy's wheel has an OpenBLAS with names of its own."""
    assert blas_in_use_after("import mlx.core, numpy") == "None"


@pytest.mark.skipif(sys.platform != "linux", reason="other systems bring their own BLAS")
def test_matrix_products_of_mlx_run_in_the_library_that_was_loaded():
    code = (
        "import ctypes, mlx_dflash, sys; names = open('/proc/self/maps').read()\n"
        "if 'libblis' not in names and 'openblas' not in names: sys.exit(77)\n"
        "address = lambda f: ctypes.cast(f, ctypes.c_void_p).value\n"
        "first = address(ctypes.CDLL(None).cblas_sgemm)\n"
        "import mlx.core as mx\n"
        "mx.eval(mx.ones((4, 64)) @ mx.ones((64, 64)))\n"
        "assert address(ctypes.CDLL(None).cblas_sgemm) == first\n"
        "low, high, path = next((int(a, 16), int(b, 16), line.split()[-1]) for line in open('/proc/self/maps')\n"
        "    for a, b in [line.split()[0].split('-')] if int(a, 16) <= first < int(b, 16))\n"
        "print(path)"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": os.getcwd()}
    )
    if run.returncode == 77:
        pytest.skip("no fast BLAS is installed")
    assert run.returncode == 0, run.stderr
    assert "blis" in run.stdout or "openblas" in run.stdout, run.stdout
