"""Who decides between kernel and twin, and what makes it decide for the twin."""

import subprocess
import sys
import time
from functools import partial

import mlx.core as mx
import numpy as np
import pytest
from support.metal_emulator import Emulator, why_unavailable

from mlx_dflash.caches.growing import GrowingKVCache
from mlx_dflash.caches.windowed import WindowedKVCache
from mlx_dflash.kernels import Kernels, choice, trial
from mlx_dflash.kernels.attention import Sight
from mlx_dflash.kernels.matmul import Quantized, multiply_ops
from mlx_dflash.kernels.record import Record
from mlx_dflash.kernels.verdict import Verdict

needs_emulator = pytest.mark.skipif(why_unavailable() is not None, reason=str(why_unavailable()))
SCALE = 0.125
KERNEL = Verdict(cores=40, simdgroups=8, ms={"1024": (1.0, 2.0)})
TWIN = Verdict("it is 0.50 times as fast as stock", is_slower=True, ms={"": (2.0, 1.0)})


def never(call):
    raise AssertionError(f"{call.name} was launched")


def draft_call(cache, head_size=64, context=40, rows=8, dtype=mx.float32):
    """Fill a cache and return the arguments of attend_block for it."""
    mx.random.seed(1)

    def normal(heads, length):
        return mx.random.normal((1, heads, length, head_size)).astype(dtype)

    cache.update_and_fetch(normal(2, context), normal(2, context))
    return normal(4, rows), (normal(2, rows), normal(2, rows)), cache


def quick(monkeypatch, gain=2.0):
    """Self-checks at one small context, and a race with a known winner."""
    monkeypatch.setattr(trial, "check_attention", partial(trial.check_attention, contexts=(33,)))
    monkeypatch.setattr(trial, "race_attention", lambda *_, **__: trial.Race({"1024": (1.0, gain)}, cores=20))


def spoiled(change):
    """A runner that emulates and then changes the result of the last pass."""
    emulator, count = Emulator(checked=False), iter(range(10**6))

    def run(call):
        outputs = emulator(call)
        return [change(outputs[0], next(count))] if "out" in call.outputs else outputs

    return run


@pytest.mark.parametrize("mode", ["off", "auto", "force"])
def test_without_a_gpu_or_switched_off_the_twin_runs(mode, monkeypatch):
    monkeypatch.setattr(choice, "has_gpu", lambda: False)
    kernels = Kernels(mode, run=never if mode == "off" else None)
    q, block, cache = draft_call(GrowingKVCache())
    out = kernels.attend_block(q, block, cache, Sight(), SCALE)
    keys, values = cache.write_block(*block)
    assert mx.array_equal(out, mx.fast.scaled_dot_product_attention(q, keys, values, scale=SCALE))
    assert not kernels.is_active


@needs_emulator
@pytest.mark.parametrize("cache", [GrowingKVCache(), WindowedKVCache(24)], ids=["growing", "windowed"])
@pytest.mark.parametrize("causal", [False, True])
def test_kernel_and_twin_agree_on_a_cache(cache, causal):
    q, block, cache = draft_call(cache, context=70)
    sight = Sight(causal, window=24 if isinstance(cache, WindowedKVCache) else 0)
    forced = Kernels("force", run=Emulator()).attend_block(q, block, cache, sight, SCALE)
    assert mx.abs(forced - Kernels("off").attend_block(q, block, cache, sight, SCALE)).max() < 1e-5


@needs_emulator
def test_kernel_leaves_the_cache_alone():
    q, block, cache = draft_call(GrowingKVCache())
    before = mx.array(cache.keys), cache.offset
    emulator = Emulator()
    Kernels("force", run=emulator).attend_block(q, block, cache, Sight(), SCALE)
    assert emulator.reports and mx.array_equal(cache.keys, before[0]) and cache.offset == before[1]


@pytest.mark.parametrize("head_size, dtype", [(8, mx.float32), (80, mx.float16), (96, mx.bfloat16)])
def test_shapes_the_kernel_does_not_know_go_to_the_twin(head_size, dtype):
    q, block, cache = draft_call(GrowingKVCache(), head_size=head_size, dtype=dtype)
    out = Kernels("force", run=never).attend_block(q, block, cache, Sight(), SCALE)
    assert out.dtype == dtype and out.shape == q.shape


def test_the_first_block_has_no_context_and_no_kernel():
    block = mx.ones((1, 2, 8, 64))
    out = Kernels("force", run=never).attend_block(
        mx.ones((1, 4, 8, 64)), (block, block), GrowingKVCache(), Sight(), SCALE
    )
    assert mx.allclose(out, mx.ones_like(out))


@needs_emulator
def test_passing_shape_is_checked_once_and_remembered(tmp_path, monkeypatch):
    quick(monkeypatch)
    arguments = *draft_call(GrowingKVCache(), rows=20), Sight(), SCALE
    launches = []
    for _ in range(2):
        emulator = Emulator(checked=False)
        kernels = Kernels("auto", Record(tmp_path / "kernels.json"), run=emulator)
        for _ in range(3):
            kernels.attend_block(*arguments)
        assert kernels.is_active
        launches.append(len(emulator.reports))
    assert launches == [2 * 2 + 3 * 2, 3 * 2]  # two passes a call; the second process trusts the first one's check


FAULTS = {
    "not finite": lambda out, i: out.at[0, 0, 0, 0].add(float("nan")),
    "differ": lambda out, i: out + 1e-6 * i,
    "error is": lambda out, i: out * 1.01,
}


@needs_emulator
@pytest.mark.parametrize("reason", FAULTS)
def test_failing_shape_goes_to_the_twin_with_one_warning(reason, monkeypatch):
    quick(monkeypatch)
    q, block, cache = draft_call(GrowingKVCache(), rows=20)
    kernels = Kernels("auto", run=spoiled(FAULTS[reason]))
    with pytest.warns(UserWarning, match=reason) as caught:
        outs = [kernels.attend_block(q, block, cache, Sight(), SCALE) for _ in range(3)]
    assert len(caught) == 1 and not kernels.is_active
    assert all(mx.array_equal(out, Kernels("off").attend_block(q, block, cache, Sight(), SCALE)) for out in outs)


def test_launch_that_metal_refuses_goes_to_the_twin_and_is_not_remembered(tmp_path):
    def refuse(call):
        raise RuntimeError("[metal::Device] Unable to build metal library from source\nprogram_source:1")

    q, block, cache = draft_call(GrowingKVCache(), rows=20)
    with pytest.warns(UserWarning, match="Unable to build"):
        Kernels("auto", Record(tmp_path / "kernels.json"), run=refuse).attend_block(q, block, cache, Sight(), SCALE)
    assert not (tmp_path / "kernels.json").exists()


def refusing(run, most_threads):
    """A chip that runs the first pass with so many threads in a threadgroup."""

    def refuse(call):
        if call.name == "dflash_attention" and np.prod(call.threadgroup) > most_threads:
            raise ValueError(f"Thread group size ({np.prod(call.threadgroup)}) is greater than {most_threads}")
        return run(call)

    return refuse


@needs_emulator
@pytest.mark.parametrize("head_size, rows", [(64, 16), (64, 2), (256, 16)])
def test_threadgroup_that_is_too_large_is_tried_at_half_its_size(head_size, rows, tmp_path, monkeypatch):
    quick(monkeypatch)
    record = Record(tmp_path / "kernels.json")
    arguments = *draft_call(GrowingKVCache(), head_size=head_size, rows=rows, context=520), Sight(), SCALE
    twin = Kernels("off").attend_block(*arguments)
    for _ in range(2):  # the second time from the record
        kernels = Kernels("auto", record, run=refusing(Emulator(checked=False), 128))
        kernels.prepare(lambda _, attend=kernels.attend_block: attend(*arguments), 2)
        out = kernels.attend_block(*arguments)
        assert kernels.is_active and mx.abs(out - twin).max() < 1e-5


def test_threadgroup_that_is_too_large_at_half_its_size_gives_way_to_the_twin(monkeypatch):
    sizes = []
    kernels = Kernels("auto", run=refusing(never, 0))
    kernels._run = lambda call, run=kernels._run: (sizes.append(call.threadgroup[0]), run(call))
    with pytest.warns(UserWarning, match="Thread group size .128. is greater"):
        kernels.attend_block(*draft_call(GrowingKVCache(), rows=20), Sight(), SCALE)
    assert sizes == [256, 128] and not kernels.is_active


@needs_emulator
def test_slower_kernel_goes_to_the_twin_without_a_warning(monkeypatch, recwarn):
    quick(monkeypatch, gain=1.02)
    kernels = Kernels("auto", run=Emulator(checked=False))
    kernels.attend_block(*draft_call(GrowingKVCache(), rows=20), Sight(), SCALE)
    assert not kernels.is_active and not recwarn.list


def test_guarded_chip_waits_for_the_sustained_check(tmp_path, monkeypatch):
    monkeypatch.setattr(choice, "chip_generation", lambda: 17)
    kernels = Kernels("auto", Record(tmp_path / "kernels.json"), run=never)
    kernels.attend_block(*draft_call(GrowingKVCache(), rows=20), Sight(), SCALE)
    assert [verdict.refused for verdict in kernels.verdicts.values()] == [
        "this chip needs the sustained check: python -m mlx_dflash.metalcheck"
    ]


@needs_emulator
def test_self_check_does_not_move_the_random_numbers_of_the_caller():
    mx.random.seed(5)
    expected = mx.random.uniform(shape=(4,))
    mx.random.seed(5)
    shape = trial.AttentionShape(4, 2, 64, 5, mx.float32, Sight(), has_block=True)
    assert trial.check_attention(shape, Emulator(checked=False), contexts=(33,)).wrong is None
    assert mx.array_equal(mx.random.uniform(shape=(4,)), expected)


@needs_emulator
def test_check_mode_compares_every_call():
    q, block, cache = draft_call(GrowingKVCache())
    Kernels("check", run=Emulator()).attend_block(q, block, cache, Sight(), SCALE)
    with pytest.raises(RuntimeError, match="attention kernel and its twin differ"):
        Kernels("check", run=spoiled(FAULTS["error is"])).attend_block(q, block, cache, Sight(), SCALE)


@needs_emulator
def test_product_by_kernel_equals_product_by_twin():
    mx.random.seed(2)
    w = Quantized(*mx.quantize(mx.random.normal((64, 128))), group_size=64, bits=4)
    x = mx.random.normal((1, 6, 128))
    assert mx.abs(Kernels("force", run=Emulator()).multiply(x, w) - multiply_ops(x, w)).max() < 1e-4
    assert mx.array_equal(Kernels("force", run=never).multiply(x[:, :2], w), multiply_ops(x[:, :2], w))


@needs_emulator
def test_watchdog_switches_off_after_a_pass_that_is_not_finite():
    kernels = Kernels("force", run=Emulator())
    arguments = *draft_call(GrowingKVCache()), Sight(), SCALE
    kernels.attend_block(*arguments)
    assert not kernels.distrusts(mx.zeros((1, 4, 10)), time.perf_counter())
    with pytest.warns(UserWarning, match="not finite"):
        assert kernels.distrusts(mx.full((1, 4, 10), float("nan")), time.perf_counter())
    assert not kernels.is_active
    kernels._run = never  # what was given up is not launched again
    kernels.attend_block(*arguments)


@needs_emulator
def test_watchdog_switches_off_after_a_stall():
    kernels = Kernels("force", run=Emulator())
    kernels.attend_block(*draft_call(GrowingKVCache()), Sight(), SCALE)
    for seconds in [0.02] * 9 + [0.9]:
        assert not kernels.distrusts(mx.zeros((1, 4, 10)), time.perf_counter() - seconds)
    with pytest.warns(UserWarning, match="a pass took 105.0 s"):
        assert not kernels.distrusts(mx.zeros((1, 4, 10)), time.perf_counter() - 105.0)
    assert not kernels.is_active


def test_broken_record_costs_a_check_only(tmp_path):
    record = Record(tmp_path / "kernels.json")
    record.path.write_text("{")
    assert record.find("shape") is None
    record.keep("shape", {"refused": None})
    assert Record(record.path).find("shape") == {"refused": None}


@pytest.mark.parametrize(
    "entry, verdict",
    [
        ({"refused": None, "simdgroups": 8, "cores": 40, "is_slower": False, "ms": {"1024": [1.0, 2.0]}}, KERNEL),
        ({"refused": "it is 0.50 times as fast as stock", "is_slower": True, "ms": {"": [2.0, 1.0]}}, TWIN),
        (
            {"refused": "two runs of the kernel differ", "from a later version": 1},
            Verdict("two runs of the kernel differ"),
        ),
    ],
    ids=["faster", "slower", "wrong"],
)
def test_a_recorded_verdict_is_read_back_as_it_was_kept(tmp_path, entry, verdict):
    assert Verdict.from_entry(entry) == verdict
    Record(tmp_path / "kernels.json").keep("shape", verdict.to_entry())
    found = Record(tmp_path / "kernels.json").find("shape")
    assert Verdict.from_entry(found) == verdict and found.items() <= entry.items()


def test_unknown_mode_is_refused():
    with pytest.raises(ValueError, match="auto, off, force, check"):
        Kernels("on")


def test_import_reads_no_kernel_text_and_makes_no_kernel():
    program = """
import mlx.core as mx
from importlib import resources
mx.fast.metal_kernel = resources.files = None
import mlx_dflash.kernels
"""
    subprocess.run([sys.executable, "-c", program], check=True)
