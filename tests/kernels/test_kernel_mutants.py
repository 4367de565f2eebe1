"""Kernels broken on purpose: the emulator or the result must notice every change."""

from dataclasses import replace
from functools import cache

import mlx.core as mx
import pytest
import test_attention_kernel as attention
import test_matmul_kernel as matmul
from support.exactness import error
from support.metal_emulator import emulate, precompile, why_unavailable
from test_attention_kernel import Case

from mlx_dflash.kernels.attention import Sight, merge_call, partial_call, plan
from mlx_dflash.kernels.matmul import multiply_call

pytestmark = pytest.mark.skipif(why_unavailable() is not None, reason=str(why_unavailable()))

BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);"
PLAIN = Case(mx.bfloat16, 64, (4, 2), 7), 600  # slices of the keys, two splits, rows that end inside a tile
SLICED = Case(mx.float16, 256, (4, 2), 5, Sight(causal=True), has_block=False), 40  # two slices of d, two of the keys
FAR = Case(mx.float16, 128, (4, 2), 2, Sight(window=70)), 257  # most of the context lies outside the window
WINDOW = Case(mx.float32, 128, (4, 2), 9, Sight(window=5)), 30
SINKS = Case(mx.bfloat16, 64, (4, 2), 7, has_sinks=True, batch=2), 40
TILE_LOOP = "for (int tile = begin; tile < end; tile += BK)"

ATTENTION = [  # problem, text of attention.metal, what it becomes, which occurrence
    (PLAIN, BARRIER, "", 0),  # staged rows are not yet there
    (PLAIN, BARRIER, "", 2),  # the next tile overwrites rows still in use
    (SLICED, BARRIER, "", 1),  # the partner's scores are not yet there
    (PLAIN, "else if (j < end)", "else", 0),  # reads past the end
    (PLAIN, "j >= n && j < end", "j >= n", 0),
    (PLAIN, "j >= n && j < end", "j > n && j < end", 0),
    (PLAIN, "(j - n) * block_keys", "j * block_keys", 0),
    (PLAIN, "seen = j < end && near", "seen = near", 0),
    (PLAIN, "float(query[(d0 + t * 8 + fm)", "float(query[(d0 + t * 8 + fn)", 0),
    (PLAIN, "head * G + r / L", "head * G + r % L", 0),
    (SINKS, "min(row0 + fn + e, R - 1)", "row0 + fn + e", 0),
    (PLAIN, "best[e], 16", "best[e], 8", 0),
    (PLAIN, "sum[e], 4", "sum[e], 1", 0),
    (PLAIN, "sum[e] *= fade[e];", "", 0),
    (PLAIN, "if (!unchanged)", "if (unchanged)", 0),
    (PLAIN, "odd ? fade[1] : fade[0]", "fade[0]", 0),
    (PLAIN, "P.thread_elements()[0] = odd ? q1 : q0", "P.thread_elements()[0] = q0", 0),
    (PLAIN, "across | (odd ? 2 : 0)", "across", 0),
    (PLAIN, "(key_slice * KT + u) * 8 + fm) * LD", "u * 8 + fm) * LD", 1),
    (PLAIN, "begin + share", "begin + share - 1", 0),
    (PLAIN, "split * share", "(split + 1) * share", 0),
    (PLAIN, "splits + split) * KS", "splits) * KS", 0),
    (SLICED, "!CAUSAL || distance >= 0", "!CAUSAL || distance > 0", 0),
    (SLICED, "!CAUSAL || distance >= 0", "true", 0),
    (SLICED, "(d_slice + o) % DS", "d_slice", 0),
    (SLICED, ") * KS + key_slice;", ") * KS;", 0),
    (SLICED, "const int d0 = d_slice * (D / DS);", "const int d0 = 0;", 0),
    (SLICED, "for (int o = 1; o < DS; ++o)", "for (int o = 1; o < 1; ++o)", 0),
    (FAR, "n - WINDOW + 1", "n - WINDOW + 2", 0),
    (FAR, "context_keys + j *", "context_keys + (j - first) *", 0),
    (WINDOW, "distance < WINDOW", "distance <= WINDOW", 0),
    (WINDOW, "distance > -WINDOW", "distance >= -WINDOW", 0),
    (SINKS, "b * keys_strides[0]", "0", 0),
    (SINKS, "b * block_values_strides[0]", "0", 0),
]
MERGE = [
    (SINKS, "bh % maximum_shape[1] * G + r / (R / G)", "bh % maximum_shape[1] * G", 0),
    (SINKS, "numerator += weight * partial", "numerator += partial", 0),
    (SINKS, "weight * total", "total", 0),
    (SINKS, "if (SINKS)", "if (false)", 0),
    (SINKS, "int p = 0; p < P", "int p = 1; p < P", 1),
]
FOUR, EIGHT = matmul.CASES[3], matmul.CASES[6]  # 11 rows, 33 features; 9 rows, 72 features
MATMUL = [
    (FOUR, BARRIER, "", 0),
    (FOUR, "min(r * 8 + fn + e, M - 1)", "r * 8 + fn + e", 0),
    (FOUR, "min(n0 + u * 8 + fm, N - 1)", "n0 + u * 8 + fm", 0),
    (FOUR, "if (m < M && n < N)", "if (m < M)", 0),
    (FOUR, "if (m < M && n < N)", "if (m < M - 1 && n < N)", 0),
    (FOUR, "k0 += SG * 64", "k0 += 64", 0),
    (FOUR, "k0 = sg * 64", "k0 = 0", 0),
    (FOUR, "(k0 / 8 + fn)", "(k0 / 8)", 0),
    (FOUR, "k0 / GROUP]", "0]", 0),
    (FOUR, "k0 / GROUP]", "0]", 1),
    (FOUR, "bias * x_sum[r][e]", "bias * x_sum[0][e]", 0),
    (FOUR, "sum, 16", "sum, 1", 0),
    (EIGHT, "bit % 32", "bit % 16", 0),
    (EIGHT, "e * WORDS + bit / 32", "e * WORDS", 0),
    (EIGHT, "sums[s * MT * NT * 64 + i]", "sums[i]", 0),
    (EIGHT, "x_strides[0]", "K / 2", 0),
]


def broken(call, change):
    """The launch with one occurrence of a text of its source replaced; the text must be there."""
    old, new, occurrence = change
    parts = call.source.split(old)
    assert len(parts) > occurrence + 1, f"{old!r} occurs {len(parts) - 1} times"
    return replace(call, source=old.join(parts[: occurrence + 1]) + new + old.join(parts[occurrence + 1 :]))


@cache
def launches(problem):
    """Both launches of a problem, the second on the results of the first; the result, and the error allowed in it."""
    case, context = problem
    q, keys, sight, scale, sinks = attention.problem(case, context)
    first = partial_call(q, keys, sight, scale, plan(q, keys, sight, cores=40))
    return first, merge_call(q, emulate(first)[0], sinks), *attention.reference(*problem)


def is_noticed(first, second, expected, allowed) -> bool:
    """Whether running first, and second on its outputs, is reported or gives a result that the tests do not allow."""
    outputs, report = emulate(first, step_limit=10**8)
    faults = [*report.errors, *report.unwritten]
    if second is not None and not faults:
        inputs = second.inputs | dict(zip(("partial", "maximum", "total"), outputs))
        outputs, report = emulate(replace(second, inputs=inputs))
        faults = [*report.errors, *report.unwritten]
    return bool(faults) or not error(outputs[0], expected) <= allowed


def mutants():
    """(name, first launch, second launch or None, expected result, allowed error) of every change."""
    for problem, *change in ATTENTION:
        first, second, *bound = launches(problem)
        yield f"attention: {change}", broken(first, change), second, *bound
    for problem, *change in MERGE:
        _, second, *bound = launches(problem)
        yield f"merge: {change}", broken(second, change), None, *bound
    for case, *change in MATMUL:
        launch = multiply_call(*matmul.problem(case))
        yield f"product: {change}", broken(launch, change), None, *matmul.reference(case)


def test_unchanged_kernels_are_not_reported():
    for problem in (PLAIN, SLICED, FAR, WINDOW, SINKS):
        assert not is_noticed(*launches(problem))
    for case in (FOUR, EIGHT):
        assert not is_noticed(multiply_call(*matmul.problem(case)), None, *matmul.reference(case))


def test_every_mutant_is_noticed():
    todo = list(mutants())
    precompile([first for _, first, *_ in todo])
    survivors = [name for name, *mutant in todo if not is_noticed(*mutant)]
    assert not survivors, "\n".join(survivors)
