"""Self-check and race of a kernel: is it right on this machine, and is it faster than its twin?

Both use made-up problems of one shape. Knows how to compare and to time; knows nothing of models, or of what the
answers are used for.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import mlx.core as mx

from .attention import SIMDGROUPS, Keys, Sight, attend_metal, attend_ops
from .call import Runner
from .matmul import Quantized, multiply_metal, multiply_ops

CONTEXTS = (1, 63, 257, 1000, 4000)  # rows, of the self-check
RACED_CONTEXTS = (1024, 8192)  # rows
RACED_CORES = (10, 20, 40, 80)  # how finely the context is split
ROUNDING = {mx.float32: 2**-20, mx.float16: 2**-10, mx.bfloat16: 2**-7}
NEEDED_GAIN = 1.05
CACHED_BYTES = 128 << 20  # no chip's last-level cache is larger


@dataclass(frozen=True)
class AttentionShape:
    """The properties of an attention call for which a kernel is compiled and a verdict holds."""

    heads: int
    kv_heads: int
    head_size: int
    rows: int
    dtype: mx.Dtype
    sight: Sight
    has_block: bool
    has_sinks: bool = False
    batch: int = 1

    def __str__(self):
        flags = [
            self.sight.causal and "causal",
            self.sight.window and f"window {self.sight.window}",
            self.has_block and "block apart",
            self.has_sinks and "sinks",
            self.batch > 1 and f"batch {self.batch}",
        ]
        size = f"{self.heads}/{self.kv_heads}/{self.head_size}"
        return " ".join(["attention", size, str(self.dtype)[9:], f"rows {self.rows}", *filter(None, flags)])

    def problem(self, length: int) -> tuple[mx.array, Keys, mx.array | None]:
        """Make up queries, keys with NaN in the spare rows of their buffers, and sinks, for a context of a length."""
        # Explicit random keys: a self-check in the middle of a run must not change the caller's random numbers.
        seeds = iter(mx.random.split(mx.random.key(length), 6))

        def normal(heads: int, rows: int) -> mx.array:
            shape = self.batch, heads, rows, self.head_size
            return mx.random.normal(shape, key=next(seeds)).astype(self.dtype)

        block = (normal(self.kv_heads, self.rows), normal(self.kv_heads, self.rows)) if self.has_block else None
        held = length if self.has_block else length + self.rows
        spare = mx.full((self.batch, self.kv_heads, 64, self.head_size), float("nan"), self.dtype)
        buffers = [mx.concatenate([normal(self.kv_heads, held), spare], axis=2) for _ in range(2)]
        sinks = mx.random.normal((self.heads,), key=next(seeds)).astype(self.dtype) if self.has_sinks else None
        return normal(self.heads, self.rows), Keys(*buffers, length, block), sinks


@dataclass(frozen=True)
class Accuracy:
    """Largest errors of a kernel and of stock MLX in the same precision, against float32.

    wrong: the fault of the kernel, in one sentence; None if it has none.
    """

    error: float
    stock_error: float
    wrong: str | None


def check_attention(
    shape: AttentionShape, run: Runner, contexts: tuple[int, ...] = CONTEXTS, simdgroups: int = SIMDGROUPS
) -> Accuracy:
    """Compare the kernel with stock MLX at contexts of these lengths, up to the first at which it is wrong."""
    scale, found = shape.head_size**-0.5, []
    for length in contexts:
        q, keys, sinks = shape.problem(length)
        wide = [None if x is None else x.astype(mx.float32) for x in (q, keys.keys, keys.values, sinks)]
        block = keys.block and tuple(x.astype(mx.float32) for x in keys.block)
        exact = attend_ops(wide[0], Keys(wide[1], wide[2], length, block), shape.sight, scale, wide[3])
        stock = attend_ops(q, keys, shape.sight, scale, sinks)
        twice = [attend_metal(q, keys, shape.sight, scale, sinks, run=run, simdgroups=simdgroups) for _ in range(2)]
        found.append(compare(*twice, stock, exact))
        if found[-1].wrong:
            break
    wrong = found[-1].wrong and f"{found[-1].wrong} at context {length}"
    return Accuracy(max(one.error for one in found), max(one.stock_error for one in found), wrong)


def check_product(x_shape: tuple[int, ...], w: Quantized, run: Runner) -> Accuracy:
    """Compare the kernel with stock MLX at one product of x_shape and w."""
    x = mx.random.normal(x_shape, key=mx.random.key(0)).astype(w.scales.dtype)
    wide = Quantized(w.weight, w.scales.astype(mx.float32), w.biases.astype(mx.float32), w.group_size, w.bits)
    exact = multiply_ops(x.astype(mx.float32), wide)
    return compare(multiply_metal(x, w, run=run), multiply_metal(x, w, run=run), multiply_ops(x, w), exact)


def compare(first: mx.array, second: mx.array, stock: mx.array, exact: mx.array) -> Accuracy:
    """Compare two runs of a kernel with stock MLX in the same precision (stock) and in float32 (exact).

    All arrays have one shape. The error of the kernel may be twice that of stock MLX plus one rounding of the result.
    """
    error, stock_error = (mx.abs(x.astype(mx.float32) - exact).max().item() for x in (first, stock))
    allowed = 2 * stock_error + ROUNDING[first.dtype] * mx.abs(exact).max().item()
    wrong = None
    if not mx.isfinite(first.astype(mx.float32)).all().item():
        wrong = "the kernel gives numbers that are not finite"
    elif not mx.array_equal(first, second).item():
        wrong = "two runs of the kernel differ"
    elif error > allowed:
        wrong = f"the kernel's error is {error:.2e}, allowed is {allowed:.2e}"
    return Accuracy(error, stock_error, wrong)


@dataclass(frozen=True)
class Race:
    """Times of a kernel and of its twin.

    ms: length of the context ("" for a product) -> milliseconds of kernel and twin. cores: the number of cores for
    which the kernel was cut up best; None for a product.
    """

    ms: dict[str, tuple[float, float]]
    cores: int | None = None

    @property
    def gain(self) -> float:
        """The speed of the kernel as a multiple of its twin's, at the context where it gains least."""
        return min(twin / kernel for kernel, twin in self.ms.values())


def race_attention(
    shape: AttentionShape, run: Runner, contexts: tuple[int, ...] = RACED_CONTEXTS, simdgroups: int = SIMDGROUPS
) -> Race:
    """Time kernel and twin at contexts of these lengths, the kernel once for each of RACED_CORES."""
    times: dict[int, dict[int, tuple[float, float]]] = {cores: {} for cores in RACED_CORES}  # cores -> length -> ms
    for length in contexts:
        problems = [shape.problem(length) for _ in range(4)]
        twin = attention_ms(attend_ops, shape, problems)
        for cores in RACED_CORES:
            kernel = partial(attend_metal, run=run, cores=cores, simdgroups=simdgroups)
            times[cores][length] = attention_ms(kernel, shape, problems), twin
    best = max(RACED_CORES, key=lambda cores: sum(twin / ours for ours, twin in times[cores].values()))
    return Race({str(length): ms for length, ms in times[best].items()}, best)


def attention_ms(attend: Callable[..., mx.array], shape: AttentionShape, problems: list) -> float:
    """Time one call of attend_metal or attend_ops; the queries of a call are the result of the previous one."""

    def step(q: mx.array, problem: tuple) -> mx.array:
        _, keys, sinks = problem
        return attend(q, keys, shape.sight, shape.head_size**-0.5, sinks)

    return 1e3 * seconds_per_call(problems, step, problems[0][0])


def race_product(x_shape: tuple[int, ...], w: Quantized, run: Runner) -> Race:
    """Time kernel and twin of a product of x_shape and w."""
    # Several copies, so that none stays in the cache; a matrix that is too large for that needs none.
    num_copies = 4 if w.weight.nbytes < CACHED_BYTES else 0
    copies = [Quantized(w.weight + 0, w.scales, w.biases, w.group_size, w.bits) for _ in range(num_copies)] or [w]
    x = mx.random.normal(x_shape, key=mx.random.key(0)).astype(w.scales.dtype)

    def ms(multiply: Callable[..., mx.array]) -> float:
        # The next x depends on the last product, at little cost: calls that could overlap would time something else.
        return 1e3 * seconds_per_call(copies, lambda at, copy: x + 0 * multiply(at, copy)[..., :1], x)

    return Race({"": (ms(partial(multiply_metal, run=run)), ms(multiply_ops))})


def seconds_per_call(problems: list, step: Callable, start: mx.array, calls: int = 24) -> float:
    """Return the best mean time of three chains of calls, where each call uses the result of the previous one.

    step(result, problem) makes a call; the problems take turns. start: the first result.
    """
    best = float("inf")
    for _ in range(4):  # the first warms up
        mx.eval(start)
        at, began = start, time.perf_counter()
        for i in range(calls):
            at = step(at, problems[i % len(problems)])
        mx.eval(at)
        best = min(best, (time.perf_counter() - began) / calls)
    return best
