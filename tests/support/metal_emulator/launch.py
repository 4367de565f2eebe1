"""Run one KernelCall on the CPU and report what it did wrong."""

import ctypes
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np

from .rewrite import to_cpp
from .signature import ATTRIBUTES, c_type, signature, template_arguments, used_metadata
from .toolchain import build, command

ERRORS = {
    1: ("out-of-bounds", "{verb} {name}[{index}], which has {other} elements"),
    2: ("read-only write", "write to input {name}[{index}]"),
    3: ("uninitialised", "read of {name}[{index}]"),
    4: ("race", "{verb} {name}[{index}], no barrier since thread {o_thread} of group {o_group} used it"),
    5: ("divergence", "simdgroup split: thread {other} waits on line {extra}"),
    6: (
        "barrier",
        "threads {thread} and {other} wait at different barriers (line {extra}), or {other} of {extra} came",
    ),
    7: ("undefined", "{name} ({index})"),
    8: ("threadgroup memory", "{index} bytes with {name}, limit 32768"),
    9: ("step limit", "endless loop?"),
    10: ("wild pointer", "{verb} at {index:#x}"),
    11: ("inactive lane", "value of a lane that takes no part"),
    12: ("crash", "signal {other} at {index:#x} (stack overflow?)"),
}
INPUT, OUTPUT, CONSTANT = range(3)
BUFFER_COUNTERS = "load_bytes store_bytes group_read group_write read written unwritten".split()
LAUNCH_COUNTERS = "steps simd_ops barriers mmas same_value_races".split()


def _struct(**fields):
    types = {
        "u32": ctypes.c_uint32,
        "i32": ctypes.c_int32,
        "i64": ctypes.c_int64,
        "u64": ctypes.c_uint64,
        "ptr": ctypes.c_void_p,
        "str": ctypes.c_char_p,
        "xyz": ctypes.c_uint32 * 3,
    }
    pairs = [(name, types[kind.rstrip("_")]) for kind, names in fields.items() for name in names.split()]
    return type("Struct", (ctypes.Structure,), {"_fields_": pairs})


_Buffer = _struct(str="name", ptr="data", u64="bytes origin", u32="element kind", u64_=" ".join(BUFFER_COUNTERS))
_Error = _struct(u64="pc", str="name", i64="index", i32="kind line count thread group other extra pad")
_Launch = _struct(
    xyz="grid threadgroup",
    u32="num_buffers order num_errors threadgroup_bytes",
    ptr="buffers errors",
    u64=" ".join(["step_limit"] + LAUNCH_COUNTERS),
)


class KernelError(RuntimeError):
    """A launch broke a rule; the message names the line."""


@dataclass(frozen=True)
class Fault:
    """One broken rule, and the line of the kernel that broke it."""

    kind: str
    message: str
    line: int  # in the kernel body; 0: unknown
    code: str

    def __str__(self):
        return f"[{self.kind}] {self.message}\n    line {self.line}: {self.code}"


@dataclass
class Report:
    """Faults and counters of a launch.

    buffers: name -> counters in bytes. group_read counts each byte once in a threadgroup, read once in the launch,
    load_bytes at every access.
    """

    call: object
    errors: list[Fault] = field(default_factory=list)
    unwritten: dict[str, int] = field(default_factory=dict)  # elements of an output that no thread wrote
    buffers: dict[str, dict[str, int]] = field(default_factory=dict)
    counters: dict[str, int] = field(default_factory=dict)


def emulate(call, order: int = 0, checked: bool = True, step_limit: int = 10**10) -> tuple[list[mx.array], Report]:
    """Run a launch. Returns its outputs and the report.

    order: of the threads: 0 ascending, 1 descending, n > 1 shuffled with that seed. Faults are reported, not raised.
    With checked=False only the result is computed, several times faster.
    """
    if np.prod(call.threadgroup) > 1024:
        raise ValueError(f"a threadgroup has at most 1024 threads, this one has {np.prod(call.threadgroup)}")
    buffers, keep, arguments = _bind(call)
    library = build(_program(call, arguments), checked)
    errors = (_Error * 32)()
    three = ctypes.c_uint32 * 3
    launch = _Launch(
        three(*call.grid),
        three(*map(min, call.threadgroup, call.grid)),
        len(buffers),
        order,
        buffers=ctypes.addressof(buffers),
        errors=ctypes.addressof(errors),
        step_limit=step_limit,
    )
    ctypes.CDLL(str(library)).emu_launch(ctypes.byref(launch))
    outputs = []
    for buffer, array in zip(buffers, keep):
        if buffer.kind == OUTPUT:
            _, dtype = call.outputs[buffer.name.decode()]
            outputs.append(mx.array(array).view(dtype) if dtype == mx.bfloat16 else mx.array(array))
    report = Report(call, errors=[_explain(library, e, call.source) for e in errors[: launch.num_errors]])
    report.counters = {n: getattr(launch, n) for n in LAUNCH_COUNTERS} | {"threadgroup_bytes": launch.threadgroup_bytes}
    report.buffers = {b.name.decode(): {n: getattr(b, n) for n in BUFFER_COUNTERS} for b in buffers}
    report.unwritten = {b.name.decode(): b.unwritten for b in buffers if checked and b.kind == OUTPUT and b.unwritten}
    return outputs, report


def precompile(calls, checked: bool = True):
    """Compile the kernels of many launches, two at a time: the compiler takes most of the time of a small test."""
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda program: build(program, checked), {_program(call, _bind(call)[2]) for call in calls}))


class Emulator:
    """A runner of launches: calling it emulates one, raises KernelError for any fault, and keeps the report."""

    def __init__(self, order: int = 0, checked: bool = True):
        self.order, self.checked, self.reports = order, checked, []

    def __call__(self, call) -> list[mx.array]:
        outputs, report = emulate(call, self.order, self.checked)
        self.reports.append(report)
        if report.errors or report.unwritten:
            faults = "\n".join(map(str, report.errors))
            raise KernelError(f"{call.name}: {faults} never written: {report.unwritten}")
        return outputs


def _storage(array: mx.array) -> np.ndarray:
    """A numpy view with the strides MLX uses; bfloat16 as its bits."""
    return np.asarray(array.view(mx.uint16) if array.dtype == mx.bfloat16 else array)


def _bind(call):
    """The buffers of a launch in MLX's order, the arrays that own them, and the C++ arguments that name them."""
    buffers, keep, arguments = [], [], []

    def add(name, array, kind, c_name, is_reference=False, low=0, num_bytes=None):
        keep.append(array)
        arguments.append(f"{'*' if is_reference else ''}({c_name}*)b[{len(buffers)}]")
        num_bytes = array.nbytes if num_bytes is None else num_bytes
        buffers.append(_Buffer(name.encode(), array.ctypes.data + low, num_bytes, -low, array.itemsize, kind))

    for name, array in call.inputs.items():
        x = _storage(array)
        ends = [(n - 1) * s for n, s in zip(x.shape, x.strides)]
        low, high = sum(min(0, e) for e in ends), sum(max(0, e) for e in ends) + x.itemsize
        add(name, x, INPUT, f"const {c_type(array.dtype)}", x.ndim == 0, low, high - low if x.size else 0)
        metadata = {
            "_shape": np.array(x.shape, np.int32),
            "_strides": np.array(x.strides, np.int64) // x.itemsize,
            "_ndim": np.array([x.ndim], np.int32),
        }
        for suffix in used_metadata(call, name):
            value = metadata[suffix]
            add(name + suffix, value, CONSTANT, f"const int{8 * value.itemsize}_t", suffix == "_ndim")
    for name, (shape, dtype) in call.outputs.items():
        stored = np.uint16 if dtype == mx.bfloat16 else np.dtype(str(dtype).rsplit(".", 1)[-1].rstrip("_"))
        add(name, np.zeros(shape, stored), OUTPUT, c_type(dtype))
    arguments += [value for name, (_, value) in ATTRIBUTES.items() if name in call.source]
    return (_Buffer * len(buffers))(*buffers), keep, arguments


def _program(call, arguments: list[str]) -> str:
    text, function = signature(call)
    values = ", ".join(value for *_, value in template_arguments(call.template))
    return (
        f'#include "metal.h"\nnamespace metal {{ namespace user {{\n'
        f'#line 1 "msl.sig"\n{text}\n#line 1 "msl.body"\n{to_cpp(call.source)}\n}} }} }}\n'
        'using namespace metal;\nextern "C" EMU_NOSAN void emu_kernel_main(void** b) '
        f"{{ user::{function}{f'<{values}>' if values else ''}({', '.join(arguments)}); }}\n"
    )


def _explain(library, error, source: str) -> Fault:
    line = error.line
    if error.pc:
        found = re.search(r"msl\.body:(\d+)", command("addr2line", "-i", "-e", str(library), hex(error.pc - 1)))
        line = int(found[1]) if found else 0
    kind, text = ERRORS[error.kind]
    fields = {name: getattr(error, name) for name, _ in _Error._fields_}
    fields |= {"name": error.name.decode(), "verb": "write" if error.extra else "read"}
    text = text.format(o_thread=error.other % 1024, o_group=error.other // 1024, **fields)
    text += f"; thread {error.thread} of group {error.group} (x{error.count})"
    lines = source.splitlines()
    return Fault(kind, text, line, lines[line - 1].strip() if 0 < line <= len(lines) else "")
