"""The attention kernel against a dense float64 reference, run by the emulator."""

import math
from dataclasses import dataclass, field
from functools import cache

import mlx.core as mx
import numpy as np
import pytest
from support.exactness import allowed_error, error, rounding, wide
from support.metal_emulator import Emulator, emulate, why_unavailable

from mlx_dflash.kernels.attention import Keys, Sight, attend_metal, attend_ops, partial_call, plan
from mlx_dflash.kernels.call import MetalRunner
from mlx_dflash.kernels.choice import has_gpu

needs_emulator = pytest.mark.skipif(why_unavailable() is not None, reason=str(why_unavailable()))
CONTEXTS = (0, 1, 31, 32, 33, 255, 257)
ORDERS = (0, 1, 7)
SCALE = 0.09


@dataclass(frozen=True)
class Case:
    """One compiled shape: everything that is a template argument."""

    dtype: mx.Dtype
    head_size: int
    heads: tuple[int, int]  # query, key/value
    rows: int
    sight: Sight = field(default_factory=Sight)
    has_block: bool = True
    has_sinks: bool = False
    batch: int = 1

    def __str__(self):
        flags = [f"window{self.sight.window}"] * bool(self.sight.window) + ["causal"] * self.sight.causal
        flags += ["block"] * self.has_block + ["sinks"] * self.has_sinks
        return f"{str(self.dtype)[9:]}-{self.heads[0]}x{self.heads[1]}x{self.head_size}-L{self.rows}-" + "-".join(flags)


CASES = [
    Case(mx.float32, 64, (4, 2), 7),
    Case(mx.float32, 128, (4, 2), 16, has_block=False),
    Case(mx.float32, 256, (4, 4), 2, Sight(causal=True)),
    Case(mx.float16, 64, (8, 1), 16, batch=2),
    Case(mx.float16, 128, (4, 4), 1),
    Case(mx.float16, 256, (6, 2), 16, Sight(causal=True), has_block=False),
    Case(mx.float16, 256, (4, 2), 5, Sight(causal=True)),
    Case(mx.bfloat16, 64, (4, 2), 16, Sight(window=40), has_sinks=True),
    Case(mx.bfloat16, 128, (8, 2), 16),
    Case(mx.bfloat16, 128, (4, 4), 7, Sight(causal=True, window=48), has_block=False),
    Case(mx.bfloat16, 128, (16, 2), 16, Sight(causal=True), has_block=False),
    Case(mx.bfloat16, 256, (6, 1), 8, has_block=False, has_sinks=True),
    Case(mx.float16, 128, (4, 2), 2, Sight(window=96)),
    Case(mx.bfloat16, 64, (8, 1), 8, Sight(causal=True, window=5)),
    Case(mx.float32, 128, (4, 2), 9, Sight(window=5)),
]
POISON = float("nan")


def problem(case: Case, context: int):
    """Inputs as a model makes them: transposed views, spare capacity full of NaN."""
    mx.random.seed(context + 7)
    heads, kv_heads = case.heads

    def normal(*shape):
        return mx.random.normal(shape).astype(case.dtype)

    def turned(num_heads):
        return normal(case.batch, case.rows, num_heads, case.head_size).transpose(0, 2, 1, 3)

    held = context if case.has_block else context + case.rows
    buffers = []
    spare = mx.full((case.batch, kv_heads, 9, case.head_size), POISON, case.dtype)
    for _ in range(2):
        buffers.append(mx.concatenate([normal(case.batch, kv_heads, held, case.head_size), spare], axis=2))
    block = (turned(kv_heads), turned(kv_heads)) if case.has_block else None
    sinks = normal(heads) if case.has_sinks else None
    q = normal(case.batch, heads, case.rows, case.head_size) if case.batch > 1 else turned(heads)
    return q, Keys(*buffers, context, block), case.sight, SCALE, sinks


def dense(keys, rows):
    """Float64 keys and values in order of position, 0 .. n + L."""
    if keys.block is None:
        return [wide(buffer)[:, :, : keys.length + rows] for buffer in (keys.keys, keys.values)]
    parts = zip((keys.keys, keys.values), keys.block)
    return [np.concatenate([wide(buffer)[:, :, : keys.length], wide(block)], axis=2) for buffer, block in parts]


def visible(rows, length, sight):
    """(L, n + L) bool: which keys a row sees, from the definition of Sight."""
    seen = np.zeros((rows, length + rows), bool)
    for i in range(rows):
        for j in range(length + rows):
            in_window = not sight.window or abs(length + i - j) < sight.window
            seen[i, j] = in_window and (j <= length + i or not sight.causal)
    return seen


def dense_attention(q, keys, sight, scale, sinks, dtype=np.float64):
    """Attention by its definition, (B, Hq, L, d) in numpy's dtype: every sum adds its terms one after another."""
    seen = visible(q.shape[2], keys.length, sight)
    groups = q.shape[1] // keys.keys.shape[1]
    k, v = (np.repeat(x, groups, axis=1).astype(dtype) for x in dense(keys, q.shape[2]))
    q = wide(q, dtype)
    scores = np.zeros((*q.shape[:3], k.shape[2]), dtype)
    for c in range(q.shape[3]):
        scores += q[..., c, None] * k[:, :, None, :, c]
    scores = np.where(seen, scores * dtype(scale), dtype(-np.inf))
    top = scores.max(-1)
    weights, out, total = np.exp(scores - top[..., None]), np.zeros_like(q), np.zeros_like(top)
    for j in range(k.shape[2]):
        out += weights[..., j, None] * v[:, :, None, j]
        total += weights[..., j]
    if sinks is not None:
        total += np.exp(wide(sinks, dtype)[:, None] - top)
    return out / total[..., None]


@cache
def reference(case, context):
    """The float64 result of a problem, and how far from it the kernel may be."""
    arguments = problem(case, context)
    expected = dense_attention(*arguments)
    return expected, allowed_error(dense_attention(*arguments, dtype=np.float32), expected, case.dtype)


@needs_emulator
@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernel_is_as_exact_as_plain_float32(case):
    for turn, context in enumerate(CONTEXTS):
        expected, allowed = reference(case, context)
        for order in ORDERS if context == 33 else ORDERS[turn % 3 :][:1]:
            out = attend_metal(*problem(case, context), run=Emulator(order))
            assert error(out, expected) <= allowed, (context, order, error(out, expected), allowed)
            assert out.dtype == case.dtype


@pytest.mark.skipif(not has_gpu(), reason="no GPU that takes Metal kernels")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernel_on_this_gpu_is_as_exact_as_stock_attention(case):
    for context in (*CONTEXTS, 3000):
        arguments = problem(case, context)
        expected = dense_attention(*arguments)
        ours = error(attend_metal(*arguments, run=MetalRunner()), expected)
        allowed = 2 * error(attend_ops(*arguments), expected) + rounding(expected, case.dtype)
        assert ours <= allowed, (context, ours, allowed)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_twin_equals_the_dense_reference(case):
    for context in CONTEXTS:
        expected, _ = reference(case, context)
        far, allowed = error(attend_ops(*problem(case, context)), expected), 8 * rounding(expected, case.dtype)
        assert far <= allowed, (context, far, allowed)


@needs_emulator
@pytest.mark.parametrize("case", CASES, ids=str)
def test_each_key_and_value_is_read_once_per_row_group(case):
    q, keys, sight, scale, _ = problem(case, 257)
    cut = plan(q, keys, sight, cores=40)
    _, report = emulate(partial_call(q, keys, sight, scale, cut))
    seen = (min(257, sight.window - 1) if sight.window else 257) + case.rows
    least = case.batch * case.heads[1] * seen * case.head_size * case.dtype.size
    for name in ("keys", "values"):
        read = report.buffers[name]["load_bytes"] + report.buffers["block_" + name]["load_bytes"]
        assert read == least * cut.row_groups, (name, read, least, cut)
    assert report.counters["threadgroup_bytes"] <= 32768


@needs_emulator
@pytest.mark.parametrize("cores", (1, 2, 80))
def test_result_does_not_depend_on_the_number_of_splits(cores):
    case, context = CASES[0], 800
    q, keys, sight, scale, _ = problem(case, context)
    out = attend_metal(q, keys, sight, scale, run=Emulator(), cores=cores)
    expected, allowed = reference(case, context)
    far = error(out, expected)
    assert far <= allowed, (cores, plan(q, keys, sight, cores), far, allowed)


@pytest.mark.parametrize("window", (0, 700))
def test_every_split_has_keys_and_all_keys_have_a_split(window):
    q = mx.zeros((1, 8, 16, 128), mx.bfloat16)
    for length in [*range(0, 1200, 7), 4096, 32768]:
        for cores in (1, 8, 40, 76):
            sight = Sight(window=window)
            buffer = mx.zeros((1, 2, 1, 128), mx.bfloat16)
            cut = plan(q, Keys(buffer, buffer, length), sight, cores)
            keys = 16 + (min(length, window - 1) if window else length)
            share = math.ceil(math.ceil(keys / cut.splits) / cut.keys_per_tile) * cut.keys_per_tile
            assert (cut.splits - 1) * share < keys <= cut.splits * share, (length, cores, cut)
