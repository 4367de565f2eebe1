"""Check whether the Metal kernels are right and fast on this Mac.

Prints one line for each kernel and shape, and for each failure a sentence to paste into a bug report. On a chip where
kernels wait for the check of sustained use, passing it lets them run. Takes about two minutes.
"""

import argparse
import itertools
import json
import math
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models import qwen3

from .api import open_session
from .draft.config import DraftConfig
from .draft.model import DraftModel
from .kernels import Kernels, trial
from .kernels.attention import Sight, attend_metal
from .kernels.call import MetalRunner, Runner
from .kernels.choice import STALL_FACTOR, STALL_SECONDS, SUSTAINED, has_gpu
from .kernels.matmul import Quantized
from .kernels.record import Record, default_path
from .kernels.trial import AttentionShape
from .pair import Pair

ATTENTION = {  # name -> shape
    "draft": AttentionShape(32, 8, 128, 16, mx.bfloat16, Sight(), has_block=True),
    "draft, 8 rows": AttentionShape(32, 8, 128, 8, mx.bfloat16, Sight(), has_block=True),
    "draft, window": AttentionShape(32, 8, 128, 16, mx.bfloat16, Sight(causal=True, window=2048), has_block=True),
    "verify": AttentionShape(32, 8, 128, 16, mx.bfloat16, Sight(causal=True), has_block=False),
    "verify, half": AttentionShape(16, 8, 64, 16, mx.float16, Sight(causal=True), has_block=False),
    "verify, wide": AttentionShape(24, 4, 256, 16, mx.bfloat16, Sight(causal=True), has_block=False),
}
PRODUCTS = {"4 bit": (16, 5120, 17408, 4), "4 bit, 8 rows": (8, 5120, 17408, 4), "8 bit": (16, 4096, 4096, 8)}
CONTEXTS = (1024, 8192, 32768)  # rows
SUSTAINED_CALLS, SUSTAINED_CONTEXT = 2000, 4096
PIPELINED_LAYERS, PIPELINED_TOKENS = 24, 40
HEADINGS = f"{'kernel':28}    n    err ours/stock   stock ms   ours ms speedup   GB/s  TFLOP/s"


def main(arguments: list[str] | None = None) -> int:
    """Run the check. Returns the exit status: 0 if every kernel is right, 1 if one is not or there is no Metal GPU."""
    parser = argparse.ArgumentParser(prog="python -m mlx_dflash.metalcheck", description=__doc__)
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="also write all numbers of the check to FILE, as JSON"
    )
    options = parser.parse_args(arguments)
    if not has_gpu():
        print(
            "metalcheck needs a Mac with Apple silicon; this machine has no Metal GPU. "
            "On Linux, `pytest tests/kernels` runs the kernels in an emulator.",
            file=sys.stderr,
        )
        return 1
    report = {"machine": machine(), "probe": probe(), "kernels": [], "failures": []}
    print(*(f"{name}: {value}" for part in ("machine", "probe") for name, value in report[part].items()), sep="\n")
    run = MetalRunner()
    print(HEADINGS)
    for row in itertools.chain(attention_rows(run), product_rows(run)):
        report["kernels"].append(row)
        print(line(row))
    right = not any(row["wrong"] for row in report["kernels"])
    choices = {"stock": Kernels("off")} | ({"kernels": Kernels("force", run=run)} if right else {})
    report["moved caches"] = {name: moved_caches(kernels) for name, kernels in choices.items()}
    print(
        "pipelining: caches moved per round (expect 0): "
        + ", ".join(f"{n} {x:g}" for n, x in report["moved caches"].items())
    )
    report["sustained"] = sustained(run)
    print("sustained: " + ", ".join(f"{name} {value}" for name, value in report["sustained"].items()))
    Record(default_path()).keep(SUSTAINED, report["sustained"])
    report["failures"] = failures(report)
    print(*report["failures"], sep="\n")
    if options.json:
        options.json.write_text(json.dumps(report, indent=1))
    return 1 if report["failures"] else 0


def machine() -> dict:
    """Describe this machine."""
    info = mx.device_info()
    return {
        "device": info["device_name"],
        "architecture": info["architecture"],
        "macOS": platform.mac_ver()[0],
        "mlx": mx.__version__,
    }


def probe(elements: int = 2**28, size: int = 4096) -> dict:
    """Measure bandwidth, matrix throughput, and the time of a dispatch and of a wake-up of the host."""
    large, square = mx.ones((elements,), mx.float16), mx.ones((size, size), mx.float16)
    tiny = mx.zeros((8,))
    read = trial.seconds_per_call([large], lambda at, x: mx.max(x) + at, mx.zeros((), mx.float16), calls=4)
    product = trial.seconds_per_call([square], lambda at, x: at @ x * 0, square, calls=8)
    dispatch = trial.seconds_per_call([tiny], lambda at, x: mx.abs(at), tiny, calls=1000)
    wake = trial.seconds_per_call([tiny], lambda at, x: at + x, tiny, calls=1)
    return {
        "read GB/s": round(large.nbytes / read / 1e9),
        "half TFLOP/s": round(2 * size**3 / product / 1e12, 1),
        "dispatch us": round(1e6 * dispatch, 2),
        "host wake us": round(1e6 * wake, 1),
    }


def attention_rows(run: Runner):
    """Yield a row for each shape and context with the error and the time. A wrong kernel is not timed."""
    for name, shape in ATTENTION.items():
        start = {"kernel": f"attention ({name})", "shape": str(shape)}
        found = tried(trial.check_attention, shape, run)
        if found.wrong:
            yield start | {"context": "", "wrong": found.wrong}
            continue
        race = trial.race_attention(shape, run, CONTEXTS)
        for context in CONTEXTS:
            flops = 4 * shape.heads * shape.rows * context * shape.head_size
            read = 2 * shape.kv_heads * context * shape.head_size * shape.dtype.size
            found = tried(trial.check_attention, shape, run, contexts=(context,))
            yield start | {
                "context": context,
                **accuracy(found),
                "cores": race.cores,
                **timed(race.ms[str(context)], read, flops),
            }


def product_rows(run: Runner):
    """Yield a row for each quantized product. A wrong kernel is not timed."""
    for name, (rows, inputs, outputs, bits) in PRODUCTS.items():
        weight = mx.random.normal((outputs, inputs), key=mx.random.key(0)).astype(mx.bfloat16)
        w = Quantized(*mx.quantize(weight, group_size=64, bits=bits), 64, bits)
        found = tried(trial.check_product, (rows, inputs), w, run)
        row = {"kernel": f"product ({name})", "shape": f"{rows}x{inputs}x{outputs}", "context": "", **accuracy(found)}
        if found.wrong is None:
            read = w.weight.nbytes + w.scales.nbytes + w.biases.nbytes
            row |= timed(trial.race_product((rows, inputs), w, run).ms[""], read, 2 * rows * inputs * outputs)
        yield row


def tried(check: Callable[..., trial.Accuracy], *arguments, **options) -> trial.Accuracy:
    """Check a kernel. If Metal refuses it, it counts as wrong, and the first line of Metal's message says why."""
    try:
        return check(*arguments, **options)
    except (RuntimeError, ValueError) as error:
        return trial.Accuracy(math.inf, math.inf, f"{type(error).__name__}: {str(error).splitlines()[0]}")


def accuracy(found: trial.Accuracy) -> dict:
    """Return the columns of a row that give the error."""
    return {"error": found.error, "stock error": found.stock_error, "wrong": found.wrong}


def timed(times: tuple[float, float], read_bytes: int, flops: int) -> dict:
    """Return the columns of a row that give the time. times: milliseconds of kernel and stock MLX."""
    ours, stock = times
    return {
        "ms": ours,
        "stock ms": stock,
        "speedup": stock / ours,
        "GB/s": read_bytes / ours / 1e6,
        "TFLOP/s": flops / ours / 1e9,
    }


def line(row: dict) -> str:
    """Format a row of the table under HEADINGS."""
    start = f"{row['kernel']:28} {row['context']:>6} "
    if row["wrong"]:
        return start + "WRONG: " + row["wrong"]
    return start + (
        f"{row['error']:8.1e}/{row['stock error']:7.1e} {row['stock ms']:9.3f} {row['ms']:9.3f} {row['speedup']:7.2f} "
        f"{row['GB/s']:6.0f} {row['TFLOP/s']:8.2f}"
    )


def tiny_pair(kernels: Kernels) -> tuple[nn.Module, DraftModel]:
    """Make a target and a draft with random weights, to look at their caches."""
    sizes = dict(
        hidden_size=64,
        intermediate_size=128,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        vocab_size=32,
        rms_norm_eps=1e-6,
        max_position_embeddings=4096,
        rope_theta=10000.0,
        model_type="qwen3",
    )
    target = qwen3.Model(qwen3.ModelArgs(num_hidden_layers=PIPELINED_LAYERS, tie_word_embeddings=False, **sizes))
    nested = dict(target_layer_ids=[0, PIPELINED_LAYERS - 2], mask_token_id=31, block_size=8)
    config = DraftConfig.from_dict(
        dict(num_hidden_layers=2, num_target_layers=PIPELINED_LAYERS, dflash_config=nested, **sizes)
    )
    draft = DraftModel(config, kernels=kernels)
    mx.eval(target.parameters(), draft.parameters())
    return target, draft


def moved_caches(kernels: Kernels) -> float:
    """Count the buffers of all caches that change their place in memory, for each round in which none has to grow.

    Looking waits for the device, so some rounds pass between two looks. Their number is odd, because a buffer that
    moves in every round may return to the place it had two rounds ago.
    """
    target, draft = tiny_pair(kernels)
    session = open_session(Pair(target, draft), mx.array([1] * 9), PIPELINED_TOKENS)
    rounds, moved, seen = session.rounds(mx.array([1] * 9)), 0, 0
    for span in itertools.count(1, 2):
        before = places([*session.target.caches, *session.drafter.caches])
        passed = len(list(itertools.islice(rounds, span)))
        after = places([*session.target.caches, *session.drafter.caches])
        moved += sum(a != b and before.keys() == after.keys() for a, b in zip(before.values(), after.values()))
        seen += passed
        if passed < span:
            return moved / seen


def places(caches: list) -> dict[tuple, int]:
    """Return the addresses of the keys and values of every cache, by their number and shape."""
    buffers = [array for cache in caches for array in (cache.keys, cache.values) if array is not None]
    return {(i, *array.shape): np.asarray(array).ctypes.data for i, array in enumerate(buffers)}


def sustained(run: Runner) -> dict:
    """Make many calls, one after another. Returns the median and the longest time, and whether no call stalled."""
    shape = ATTENTION["draft"]
    q, keys, _ = shape.problem(SUSTAINED_CONTEXT)
    times = []
    for _ in range(SUSTAINED_CALLS):
        began = time.perf_counter()
        mx.eval(attend_metal(q, keys, shape.sight, shape.head_size**-0.5, run=run))
        times.append(time.perf_counter() - began)
    stalled = max(times[1:]) > max(STALL_SECONDS, STALL_FACTOR * statistics.median(times))
    return {
        "calls": SUSTAINED_CALLS,
        "median ms": 1e3 * statistics.median(times),
        "max ms": 1e3 * max(times[1:]),
        "passed": not stalled,
    }


def failures(report: dict) -> list[str]:
    """Return a sentence for each thing that is wrong, with everything that a bug report needs."""
    on = "on {device} ({architecture}), macOS {macOS}, mlx {mlx}".format(**report["machine"])
    found = [
        f"The kernel for {row['shape']} is wrong {on}: {row['wrong']}." for row in report["kernels"] if row["wrong"]
    ]
    found += [
        f"Appending to a cache copies it {on}: {moved:g} buffers moved per round ({name}), expected 0."
        for name, moved in report["moved caches"].items()
        if moved
    ]
    if not report["sustained"]["passed"]:
        found.append(
            f"Sustained use stalled {on}: one of {report['sustained']['calls']} calls took "
            f"{report['sustained']['max ms']:.0f} ms, the median is {report['sustained']['median ms']:.2f} ms."
        )
    return found


if __name__ == "__main__":
    sys.exit(main())
