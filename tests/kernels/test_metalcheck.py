"""The check for the owner of a Mac: its output, the faults that it names, and the verdict that it keeps."""

import json
from functools import partial

import mlx.core as mx
import pytest
from support.metal_emulator import Emulator, emulate, why_unavailable

from mlx_dflash import metalcheck
from mlx_dflash.caches.growing import GrowingKVCache
from mlx_dflash.kernels import Kernels, Sight, choice, trial
from mlx_dflash.kernels.record import Record

needs_emulator = pytest.mark.skipif(why_unavailable() is not None, reason=str(why_unavailable()))


@pytest.fixture
def mac(tmp_path, monkeypatch):
    """A machine whose GPU is the emulator: small shapes, few calls, times that are made up."""
    shape = trial.AttentionShape(4, 2, 64, 8, mx.float16, Sight(), has_block=True)
    monkeypatch.setattr(metalcheck, "has_gpu", lambda: True)
    # Not an Emulator: its reports would hold the caches that a launch has read.
    monkeypatch.setattr(metalcheck, "MetalRunner", lambda: lambda call: emulate(call, checked=False)[0])
    monkeypatch.setattr(metalcheck, "ATTENTION", {"draft": shape})
    monkeypatch.setattr(metalcheck, "PRODUCTS", {"4 bit": (6, 64, 32, 4)})
    monkeypatch.setattr(metalcheck, "CONTEXTS", (64,))
    monkeypatch.setattr(metalcheck, "SUSTAINED_CALLS", 3)
    monkeypatch.setattr(metalcheck, "SUSTAINED_CONTEXT", 64)
    monkeypatch.setattr(metalcheck, "PIPELINED_LAYERS", 2)
    monkeypatch.setattr(metalcheck, "PIPELINED_TOKENS", 9)
    monkeypatch.setattr(metalcheck, "probe", partial(metalcheck.probe, 2**10, 32))
    monkeypatch.setattr(metalcheck, "default_path", lambda: tmp_path / "kernels.json")
    monkeypatch.setattr(trial, "check_attention", partial(trial.check_attention, contexts=(33,)))
    monkeypatch.setattr(trial, "race_attention", lambda *_, **__: trial.Race({"64": (0.5, 1.0)}, cores=20))
    monkeypatch.setattr(trial, "race_product", lambda *_: trial.Race({"": (0.5, 1.0)}))
    return tmp_path


def test_without_a_gpu_one_line_says_what_is_missing(capsys):
    if choice.has_gpu():
        pytest.skip("this machine has a GPU that takes Metal kernels")
    assert metalcheck.main([]) == 1
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.count("\n") == 1 and "needs a Mac" in printed.err


@needs_emulator
def test_right_kernels_pass_and_the_numbers_go_to_a_file(mac, capsys):
    assert metalcheck.main(["--json", str(mac / "out.json")]) == 0
    report = json.loads((mac / "out.json").read_text())
    assert [row["wrong"] for row in report["kernels"]] == [None, None] and report["failures"] == []
    assert report["kernels"][0]["speedup"] == 2 and report["sustained"]["passed"]
    printed = capsys.readouterr().out
    assert "attention (draft)" in printed and "sustained: calls 3" in printed
    assert "pipelining: caches moved per round (expect 0): stock 0, kernels 0\n" in printed
    for row in report["kernels"]:
        assert 0 < row["error"] < 1 and 0 < row["stock error"] < 1
        assert f"{row['error']:.1e}/{row['stock error']:.1e}" in printed


def held(method):
    """A method of a cache that somebody keeps a view of, so that the next append cannot be made in place."""
    views = []
    return lambda *arguments: views.append(method(*arguments)) or views[-1]


@pytest.mark.parametrize("is_held", [False, True])
def test_a_cache_moves_only_if_somebody_holds_it(is_held, monkeypatch):
    monkeypatch.setattr(metalcheck, "PIPELINED_LAYERS", 4)
    if is_held:
        monkeypatch.setattr(GrowingKVCache, "update_and_fetch", held(GrowingKVCache.update_and_fetch))
    assert (metalcheck.moved_caches(Kernels("off")) > 0) == is_held


@needs_emulator
def test_moved_caches_are_a_sentence_for_a_bug_report(mac, monkeypatch, capsys):
    monkeypatch.setattr(metalcheck, "moved_caches", lambda kernels: 2.5 * (kernels.mode == "off"))
    assert metalcheck.main([]) == 1
    assert capsys.readouterr().out.splitlines()[-1].startswith("Appending to a cache copies it on ")


@needs_emulator
def test_wrong_kernel_is_a_sentence_for_a_bug_report(mac, monkeypatch, capsys):
    emulator = Emulator(checked=False)
    monkeypatch.setattr(metalcheck, "MetalRunner", lambda: lambda call: [1.05 * x for x in emulator(call)])
    assert metalcheck.main([]) == 1
    last = capsys.readouterr().out.splitlines()[-2:]
    assert all(
        text.startswith("The kernel for ") and "error is" in text and f"mlx {mx.__version__}" in text for text in last
    )


@needs_emulator
@pytest.mark.parametrize("passes", [True, False])
def test_only_a_passed_sustained_check_releases_a_guarded_chip(mac, monkeypatch, passes):
    monkeypatch.setattr(choice, "chip_generation", lambda: 17)
    monkeypatch.setattr(metalcheck, "STALL_SECONDS", 1.0 if passes else 0.0)
    monkeypatch.setattr(metalcheck, "STALL_FACTOR", 20.0 if passes else 0.0)
    assert metalcheck.main([]) == (0 if passes else 1)
    kernels = Kernels("auto", Record(mac / "kernels.json"), run=Emulator(checked=False))
    buffer = mx.zeros((1, 2, 64, 64))
    kernels.attend(mx.zeros((1, 4, 20, 64)), choice.Keys(buffer, buffer, 44), Sight(), 0.1)
    assert kernels.is_active == passes
