"""The emulator itself: broken kernels are caught in every thread order, sound ones pass with the right result."""

import re

import mlx.core as mx
import numpy as np
import pytest
from support.metal_emulator import emulate, precompile, why_unavailable
from support.metal_emulator.signature import signature

from mlx_dflash.kernels.call import KernelCall

pytestmark = pytest.mark.skipif(why_unavailable() is not None, reason=str(why_unavailable()))

ORDERS = (0, 1, 7)
X = np.arange(64, dtype=np.float32)
SYNC = "threadgroup_barrier(mem_flags::mem_threadgroup);"

BAD = {  # name: (kinds of fault, one of which must be reported; body; threads; length of out)
    "no barrier between write and read": ("race", "threadgroup float b[64]; b[i] = x[i]; out[i] = b[63 - i];"),
    "no barrier before reuse": (
        "race",
        f"""threadgroup float b[64];
        for (int r = 0; r < 2; ++r) {{ b[i] = x[i] + r; {SYNC} out[i] = b[63 - i]; }}""",
    ),
    "simdgroup barrier for the whole group": (
        "race",
        """threadgroup float b[64]; b[i] = x[i];
        simdgroup_barrier(mem_flags::mem_threadgroup); out[i] = b[63 - i];""",
    ),
    "barrier that orders no memory": (
        "race",
        """threadgroup float b[64]; b[i] = x[i];
        threadgroup_barrier(mem_flags::mem_none); out[i] = b[63 - i];""",
    ),
    "device memory ordered as threadgroup memory": (
        "race",
        f"""out[i] = x[i]; {SYNC} float v = out[63 - i];
        threadgroup_barrier(mem_flags::mem_device); out[i] = v;""",
    ),
    "lanes assumed to run in step": ("race", "threadgroup float b[32]; b[i] = x[i]; out[i] = b[31 - i];", 32, 32),
    "two groups write one element": ("race", "out[i % 32] = float(threadgroup_position_in_grid.x);", 32, 32),
    "read past the end": ("out-of-bounds", "out[i] = x[i + 1];"),
    "read before the start": ("out-of-bounds", "out[i] = x[int(i) - 1];"),
    "write past the end": ("out-of-bounds", "out[i * 2] = x[i];"),
    "vector load across the end": (
        "out-of-bounds",
        "float4 v = *(const device float4*)(x + (i & ~3u) + 4); out[i] = v.x;",
    ),
    "threadgroup array overrun": (
        "out-of-bounds|undefined",
        f"threadgroup float b[60]; b[i] = x[i]; {SYNC} out[i] = b[i];",
    ),
    "threadgroup overrun through a pointer": (
        "out-of-bounds",
        f"""threadgroup float b[60]; threadgroup float c[64];
        c[i] = 0; threadgroup float* p = b; p[i] = x[i]; {SYNC} out[i] = p[i] + c[i];""",
    ),
    "private array overrun": ("undefined", "float a[4] = {0, 1, 2, 3}; out[i] = a[i % 5] + x[i];"),
    "private matrices overrun": (
        "undefined",
        """simdgroup_float8x8 P[2][1];
        for (int r = 0; r < 2; ++r) for (int t = 0; t <= 1; ++t) P[r][t] = simdgroup_float8x8(0.0);
        out[i] = P[0][0].thread_elements()[0] + P[1][0].thread_elements()[1];""",
    ),
    "uninitialised threadgroup memory": (
        "uninitialised",
        f"threadgroup float b[64]; if (i < 63) b[i] = x[i]; {SYNC} out[i] = b[i];",
    ),
    "accumulation into a fresh output": ("uninitialised", "out[i] += x[i];"),
    "write to an input": ("read-only write", "((device float*)x)[i] = 1.0; out[i] = 0;"),
    "two different barriers": ("barrier", f"if (i < 32) {{\n{SYNC}\nout[i] = 0; }}\nelse {{\n{SYNC}\nout[i] = 1; }}"),
    "barrier after an early return": ("barrier", f"if (i >= 60) {{ out[i] = 0; return; }} {SYNC} out[i] = 1;"),
    "barrier a varying number of times": ("barrier", f"for (uint k = 0; k <= i / 32; ++k) {SYNC} out[i] = 1;"),
    "simd_sum in a branch": (
        "divergence",
        """float v = 0;
        if (i % 32 < 16) v = simd_sum(x[i]);
        v += simd_sum(1.0);
        out[i] = v;""",
    ),
    "shuffle from a lane that left": (
        "inactive lane",
        "if (i % 32 == 5) { out[i] = 0; return; } out[i] = simd_shuffle_xor(x[i], 1);",
    ),
    "misaligned vector load": (
        "undefined",
        "if (i < 15) { float4 v = *(const device float4*)(x + i + 1); out[i] = v.x; } else out[i] = 0;",
    ),
    "too much threadgroup memory": ("threadgroup memory", "threadgroup float b[8193]; b[i] = x[i]; out[i] = b[i];"),
    "endless loop": ("step limit", "out[i] = 0; while (out[i] == 0) { out[i] = x[0]; }"),
    "pointer to another thread's variable": (
        "wild pointer",
        f"""threadgroup uint64_t p; float mine = 3;
        if (i == 0) p = (uint64_t)&mine; {SYNC} out[i] = *(thread float*)p;""",
    ),
    "integer division by zero": ("undefined", "out[i] = float(100 / int(x[0]));"),
    "float too large for int": ("undefined", "out[i] = float(int(x[i] * 1e30f));"),
}
LANES = np.arange(32)
GOOD = {  # name: (body, expected, grid)
    "tree reduction": (
        f"""threadgroup float b[64]; b[i] = x[i]; {SYNC}
        for (uint s = 32; s > 0; s >>= 1) {{ if (i < s) b[i] += b[i + s]; {SYNC} }} out[i] = b[0];""",
        np.full(64, X.sum()),
    ),
    "the same value from every lane": ("out[i] = 0; if (i > 5) out[i] = 7.0;", np.r_[np.zeros(6), np.full(58, 7)]),
    "half rounds every operation": (
        "half a = half(2048.0), b = half(1.0); half c = a + b + b; out[i] = float(c);",
        np.full(64, 2048.0),
    ),
    "bfloat arithmetic": (
        """bfloat16_t a = bfloat16_t(256.0), b = bfloat16_t(1.0);
        out[i] = float(a + b) + (float(a) + b);""",
        np.full(64, 256.0 + 257.0),
    ),
    "swizzles and vectors": (
        """float4 v = float4(float2(1, 2), 3, 4); v.xy = v.zw; float3 t = v.xyz;
        out[i] = v.x * 1000 + v.y * 100 + t.z * 10 + v.wzyx.x;""",
        np.full(64, 3434.0),
    ),
    "shuffles": (
        """float v = float(thread_index_in_simdgroup);
        const float down = simd_shuffle_down(v, 1);
        const float up = simd_shuffle_up(v, 2);
        out[i] = down + 100 * up + 10000 * simd_broadcast(v, 3);""",
        np.tile(np.minimum(LANES + 1, 31) + 100 * np.where(LANES > 1, LANES - 2, LANES) + 30000, 2),
    ),
    "reductions": (
        "const float s = simd_sum(1.0);\nout[i] = s * 100 + simd_max(x[i]);",
        np.r_[np.full(32, 3231.0), np.full(32, 3263.0)],
    ),
    "2-D threadgroup variable, several declarators": (
        f"""alignas(16) threadgroup float a[4][16], b[2]; threadgroup uint n;
        a[i / 16][i % 16] = x[i]; if (i < 2) b[i] = 0.5; if (i == 0) n = 3; {SYNC}
        out[i] = a[3 - i / 16][i % 16] + b[i & 1] + n;""",
        X.reshape(4, 16)[::-1].ravel() + 3.5,
    ),
    "simdgroup matrices": (
        f"""simdgroup_float8x8 A, B, C = simdgroup_float8x8(0.0); threadgroup float t[64]; t[i] = x[i];
        {SYNC}
        simdgroup_load(A, x, 8); simdgroup_load(B, (const threadgroup float*)t, 8, ulong2(0, 0), true);
        simdgroup_multiply_accumulate(C, A, B, C);
        if (i < 32) simdgroup_store(C, out, 8);""",
        (X.reshape(8, 8) @ X.reshape(8, 8).T).ravel(),
    ),
}


def launch(body, threads=64, length=64):
    source = "const uint i = thread_position_in_threadgroup.x;\n" + body
    return KernelCall(
        "self_test",
        source,
        {"x": mx.array(X)},
        {"out": ((length,), mx.float32)},
        {},
        grid=(64, 1, 1),
        threadgroup=(threads, 1, 1),
    )


@pytest.fixture(scope="module", autouse=True)
def compiled():
    precompile([launch(*case[1:]) for case in BAD.values()] + [launch(body) for body, _ in GOOD.values()])


@pytest.mark.parametrize("name", BAD)
def test_broken_kernel_is_reported_in_every_thread_order(name):
    kinds, *case = BAD[name]
    for order in ORDERS:
        _, report = emulate(launch(*case), order, step_limit=10**6)
        assert {f.kind for f in report.errors} & set(kinds.split("|")), (order, report.errors)


@pytest.mark.parametrize("name", GOOD)
def test_sound_kernel_passes_with_the_right_result(name):
    body, expected = GOOD[name]
    for order in ORDERS:
        (out,), report = emulate(launch(body), order)
        assert not report.errors and not report.unwritten, (order, report)
        np.testing.assert_array_equal(np.array(out), expected)


def test_ragged_grid_has_a_smaller_last_group():
    call = KernelCall(
        "ragged",
        "out[thread_position_in_grid.x] = float(threads_per_threadgroup.x) + 100.0 * simd_sum(1.0);",
        {},
        {"out": ((100,), mx.float32)},
        {},
        (100, 1, 1),
        (64, 1, 1),
    )
    (out,), report = emulate(call)
    assert not report.errors
    np.testing.assert_array_equal(np.array(out), np.r_[np.full(64, 3264.0), np.full(32, 3236.0), np.full(4, 436.0)])


def test_outputs_never_written_are_counted():
    _, report = emulate(launch("if (i < 60) out[i] = x[i];"))
    assert report.unwritten == {"out": 4}


def test_bytes_are_counted_once_per_group_and_once_per_launch():
    call = KernelCall(
        "traffic",
        "const uint i = thread_position_in_grid.x; out[i] = x[0] + x[i % 32] + x[0];",
        {"x": mx.array(X)},
        {"out": ((64,), mx.float32)},
        {},
        (64, 1, 1),
        (32, 1, 1),
    )
    counted = emulate(call)[1].buffers["x"]
    assert (counted["read"], counted["group_read"]) == (32 * 4, 2 * 32 * 4)


def test_strided_inputs_are_read_in_place():
    whole = mx.arange(64, dtype=mx.float32).reshape(8, 8)
    call = KernelCall(
        "strided",
        "const uint i = thread_position_in_grid.x; out[i] = x[i * x_strides[0] + x_shape[0] * x_strides[1]];",
        {"x": whole.T[2:5]},
        {"out": ((3,), mx.float32)},
        {},
        (3, 1, 1),
        (3, 1, 1),
    )
    (out,), report = emulate(call)
    assert not report.errors
    np.testing.assert_array_equal(np.array(out), [2 + 24, 3 + 24, 4 + 24])


@pytest.mark.parametrize(
    "body", ["double d = 1;", "threadgroup float b;\nauto p = (float*)&b;", "threadgroup auto q[2] = 1;"]
)
def test_text_that_is_not_metal_is_refused(body):
    with pytest.raises(SyntaxError, match="not Metal|not understood"):
        emulate(launch(body))


def mlx_text(call, tmp_path, capfd):
    """What MLX itself generates for a launch: an exported function prints it, and no GPU is needed for that."""
    kernel = mx.fast.metal_kernel(
        name=call.name,
        input_names=list(call.inputs),
        output_names=list(call.outputs),
        source=call.source,
        ensure_row_contiguous=False,
    )
    shapes, dtypes = zip(*call.outputs.values())
    mx.export_function(
        str(tmp_path / "f.mlxfn"),
        lambda *inputs: kernel(
            inputs=list(inputs),
            output_shapes=list(shapes),
            output_dtypes=list(dtypes),
            grid=call.grid,
            threadgroup=call.threadgroup,
            template=list(call.template.items()),
            verbose=True,
        ),
        *call.inputs.values(),
    )
    return re.search(r"```\n(.*?\n}\n)", capfd.readouterr().out, re.S)[1]


SIGNATURES = {
    "all metadata": dict(
        source="x_shape x_strides x_ndim y_shape", inputs={"x": mx.zeros((3, 4)), "y": mx.zeros((2,))}
    ),
    "few elements are constant": dict(source="", inputs={"x": mx.zeros((7,)), "y": mx.zeros((8,)), "z": mx.array(1.0)}),
    "templates": dict(source="", template={"T": mx.bfloat16, "N": -3, "F": True, "G": 4, "U": mx.float32}),
    "dtypes": dict(
        source="",
        inputs={
            str(d)[9:]: mx.zeros((9,), d)
            for d in (mx.bool_, mx.int8, mx.int64, mx.uint8, mx.uint16, mx.uint32, mx.float16, mx.bfloat16)
        },
    ),
    "attributes": dict(
        source="thread_position_in_grid thread_index_in_simdgroup simdgroup_index_in_threadgroup "
        "thread_index_in_threadgroup threadgroup_position_in_grid threadgroups_per_grid "
        "threads_per_grid threads_per_threadgroup thread_position_in_threadgroup "
        "simdgroups_per_threadgroup threads_per_simdgroup thread_execution_width "
        "dispatch_threads_per_threadgroup grid_size"
    ),
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_signature_is_the_text_mlx_generates(name, tmp_path, capfd):
    fields = {"inputs": {"x": mx.zeros((9,))}, "template": {}} | SIGNATURES[name]
    fields["source"] += " thread_position_in_grid"  # with two outputs and no attribute at all, MLX's text is broken
    call = KernelCall(
        "golden",
        outputs={"o": ((4,), mx.float32), "p": ((2,), mx.bfloat16)},
        grid=(4, 1, 1),
        threadgroup=(4, 1, 1),
        **fields,
    )
    text, _ = signature(call)
    assert mlx_text(call, tmp_path, capfd) == text + call.source + "\n}\n"
