"""The choice between a kernel and its twin, made once for each shape; for those of a pair, before its first round.

Kernels is the one entry to this package. Models and targets call its attend_block, attend and multiply; the result is
the same either way. Knows shapes, this machine and the mode; knows nothing of models, rounds or the inside of caches.
"""

import re
import statistics
import time
import warnings
from collections.abc import Callable, Hashable

import mlx.core as mx

from . import attention, matmul, trial
from .attention import Keys, Sight
from .call import MetalRunner, Runner
from .matmul import Quantized
from .record import Record
from .trial import AttentionShape
from .verdict import Verdict, try_attention, try_product

MODES = ("auto", "off", "force", "check")
FIRST_GUARDED_GENERATION = 17  # of chips on which sustained use has stalled; see metalcheck
SUSTAINED = "sustained"
STALL_SECONDS, STALL_FACTOR, PASSES_KNOWN = 1.0, 20.0, 8
# The smallest row count of every step of either kernel.
PREPARED_ROWS = (2, 3, 5, 7, 9, 13, 17, 33, 65)


class Kernels:
    """Runs attention and products of few rows by kernel or by twin.

    mode: "auto" for the kernel where it has passed its self-check on this machine and won the race against its twin,
    "off" for twins, "force" for the kernel of every shape that it knows, without a check, "check" for both, compared at
    every call. record: keeps verdicts between runs. run: executes launches; None for the GPU.
    Raises ValueError for another mode.
    """

    def __init__(self, mode: str = "auto", record: Record | None = None, run: Runner | None = None):
        if mode not in MODES:
            raise ValueError(f"kernels must be one of {', '.join(MODES)}; got {mode!r}")
        self.mode, self.record = mode, record or Record(None)
        self.verdicts: dict[Hashable, Verdict] = {}  # by shape
        self._run = run or MetalRunner()
        # False if no shape will ever run by a kernel here.
        self.can_run = mode != "off" and (run is not None or has_gpu())
        self._seconds: list[float] = []
        self._is_preparing = self._is_prepared = False

    @property
    def is_active(self) -> bool:
        """True if any shape seen so far runs by its kernel."""
        return any(verdict.refused is None for verdict in self.verdicts.values())

    def prepare(self, play: Callable[[int], None], block_size: int) -> None:
        """Decide on every shape that the rounds of a pair will use, and compile its kernel, so that no round has to.

        play(rows) computes a round of that many rows, up to block_size, by means of this object. Shapes that do not
        come up in it run by their twins from then on.
        """
        self._is_preparing = True
        try:
            for rows in PREPARED_ROWS:
                if rows <= block_size and self.can_run:
                    play(rows)
        finally:
            self._is_preparing = False
        self._is_prepared = True
        self._seconds.clear()

    def attend_block(
        self,
        q: mx.array,
        block: tuple[mx.array, mx.array],
        cache,
        sight: Sight,
        scale: float,
        sinks: mx.array | None = None,
    ) -> mx.array:
        """Compute the attention of a draft's block over the context in a cache and over itself.

        q: (B, Hq, L, d). block: keys and values, (B, Hkv, L, d) each. cache: its first `rows` rows of keys and values
        are the context; the twin writes the block after them (write_block), the kernel reads the block where it is.
        sinks: (Hq,) logits of attending to nothing. Returns (B, Hq, L, d).
        """
        sinks = None if sinks is None else sinks.astype(q.dtype)
        if cache.rows:
            apart = Keys(cache.keys, cache.values, cache.rows, block)
            if self._verdict_on_attention(q, apart, sight, sinks):
                return self._attend_metal(q, apart, sight, scale, sinks)
        keys, values = cache.write_block(*block)
        return attention.attend_ops(q, Keys(keys, values, keys.shape[2] - q.shape[2]), sight, scale, sinks)

    def attend(self, q: mx.array, keys: Keys, sight: Sight, scale: float, sinks: mx.array | None = None) -> mx.array:
        """Compute the attention of a block. Arguments and result are those of attention.attend_ops."""
        if self._verdict_on_attention(q, keys, sight, sinks):
            return self._attend_metal(q, keys, sight, scale, sinks)
        return attention.attend_ops(q, keys, sight, scale, sinks)

    def multiply(self, x: mx.array, w: Quantized) -> mx.array:
        """Multiply x (..., K) by transposed quantized weights (N, K). Returns (..., N)."""
        if not self._verdict_on_product(x, w):
            return matmul.multiply_ops(x, w)
        product = matmul.multiply_metal(x, w, run=self._run)
        return self._checked(product, lambda: matmul.multiply_ops(x, w), "product")

    def distrusts(self, logits: mx.array, started: float) -> bool:
        """Wait for a pass that used kernels, and return whether it must be repeated without them.

        logits: (..., V), of which one column shows whether a row is finite. started: the time.perf_counter at which the
        pass was built. After a pass that stalls or is not finite, every shape runs by its twin, with one warning.
        """
        if not self.is_active:
            return False
        if not mx.isfinite(logits[..., 0]).all().item():
            self.give_up("a pass gave numbers that are not finite")
            return True
        seconds = time.perf_counter() - started
        known, self._seconds = self._seconds, [*self._seconds[-63:], seconds]
        if len(known) >= PASSES_KNOWN and seconds > max(STALL_SECONDS, STALL_FACTOR * statistics.median(known)):
            self.give_up(f"a pass took {seconds:.1f} s, {statistics.median(known):.3f} s is usual")
        return False

    def give_up(self, reason: str) -> None:
        """Run every shape by its twin from now on, and warn with the reason."""
        warnings.warn(
            f"Metal kernels are switched off: {reason}. Please report it with the output of "
            "python -m mlx_dflash.metalcheck",
            stacklevel=2,
        )
        self.can_run = False
        self.verdicts.clear()

    def _attend_metal(self, q, keys, sight, scale, sinks):
        verdict = self.verdicts[attention_shape(q, keys, sight, sinks)]
        out = attention.attend_metal(q, keys, sight, scale, sinks, run=self._run, **verdict.cut)
        return self._checked(out, lambda: attention.attend_ops(q, keys, sight, scale, sinks), "attention")

    def _checked(self, out: mx.array, twin: Callable[[], mx.array], name: str) -> mx.array:
        if self.mode != "check":
            return out
        far = mx.abs(out.astype(mx.float32) - twin().astype(mx.float32)).max().item()
        allowed = 8 * trial.ROUNDING[out.dtype] * max(1.0, mx.abs(out.astype(mx.float32)).max().item())
        if not far <= allowed:
            raise RuntimeError(
                f"the {name} kernel and its twin differ by {far:.2e} at {out.shape} {out.dtype}; "
                f"up to {allowed:.2e} is rounding"
            )
        return out

    def _verdict_on_attention(self, q, keys, sight, sinks) -> bool:
        if not self.can_run or not attention.supports(q, keys):
            return False
        # Stock MLX needs one launch for few rows over a short context; the kernel needs two.
        rows = q.shape[2] * q.shape[1] // keys.keys.shape[1]
        if self.mode == "auto" and keys.length < 512 and rows <= 32 and not self._is_preparing:
            return False
        shape = attention_shape(q, keys, sight, sinks)
        return self._is_chosen(shape, str(shape), lambda: try_attention(shape, self._run))

    def _verdict_on_product(self, x: mx.array, w: Quantized) -> bool:
        if not self.can_run or not matmul.supports(x, w):
            return False
        rows = (matmul.row_step(x.size // x.shape[-1]), x.shape[-1])
        shape = (rows, w.weight.shape[0], w.group_size, w.bits, x.dtype)
        name = f"product {w.bits} bit group {w.group_size} {str(x.dtype)[9:]} {rows[0]}x{rows[1]}x{shape[1]}"
        return self._is_chosen(shape, name, lambda: try_product(rows, w, self._run))

    def _is_chosen(self, shape: Hashable, name: str, attempt: Callable[[], Verdict]) -> bool:
        if shape not in self.verdicts:
            if self.mode == "auto" and self._is_prepared and not self._is_preparing:
                return False
            self.verdicts[shape] = self._decide(name, attempt)
        return self.verdicts[shape].refused is None

    def _decide(self, name: str, attempt: Callable[[], Verdict]) -> Verdict:
        """Return the verdict on a shape that is seen for the first time."""
        if self.mode != "auto":
            return Verdict()
        sustained = self.record.find(SUSTAINED) or {"passed": False}
        if chip_generation() >= FIRST_GUARDED_GENERATION and not sustained["passed"]:
            return Verdict("this chip needs the sustained check: python -m mlx_dflash.metalcheck")
        entry = self.record.find(name)
        verdict = attempt() if entry is None else Verdict.from_entry(entry)
        if entry is None and not verdict.is_temporary:
            self.record.keep(name, verdict.to_entry())
        if verdict.refused and not verdict.is_slower:
            warnings.warn(f"the Metal kernel for {name} is not used: {verdict.refused}", stacklevel=2)
        return verdict


def attention_shape(q: mx.array, keys: Keys, sight: Sight, sinks: mx.array | None) -> AttentionShape:
    """Return the shape of a call. Its rows are rounded to their step; the length of the context is no part of it."""
    batch, heads, rows, head_size = q.shape
    return AttentionShape(
        heads,
        keys.keys.shape[1],
        head_size,
        attention.row_step(rows),
        q.dtype,
        sight,
        keys.block is not None,
        sinks is not None,
        batch,
    )


def has_gpu() -> bool:
    """Return whether MLX computes on a GPU that takes Metal kernels."""
    return mx.metal.is_available() and mx.default_device().type == mx.DeviceType.gpu


def chip_generation() -> int:
    """Return the generation in the name of the GPU, 17 for applegpu_g17s; 0 if the name has none."""
    found = re.search(r"applegpu_g(\d+)", mx.device_info()["architecture"])
    return int(found[1]) if found else 0
