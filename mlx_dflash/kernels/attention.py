"""Attention of a block of queries over a long context and over the block: Metal kernel and twin in MLX operations.

It serves the draft, whose block rows see each other, and the verify, whose block rows see the earlier ones. Knows where
keys and values lie in memory and which of them a row sees; knows nothing of models, caches, or the choice between the
two.
"""

from dataclasses import dataclass

import mlx.core as mx

from .call import KernelCall, Runner, metal_source

HEAD_SIZES = (64, 128, 256)
DTYPES = (mx.float32, mx.float16, mx.bfloat16)
SIMDGROUPS = 8  # per threadgroup: 256 threads launch on every Apple GPU
STOCK = mx.fast.scaled_dot_product_attention  # kept here, since a target's stand-in may take its place in mx.fast
KEYS_PER_SPLIT = 256  # fewer keys than this are not worth a threadgroup of their own


@dataclass(frozen=True)
class Keys:
    """The place of one layer's keys and values in memory.

    keys, values: (B, Hkv, C, d) buffers, d contiguous, rows 16-byte aligned. The first `length` of the C rows are the
    context; the others may hold anything. block: the block's own keys and values, (B, Hkv, L, d) each, or None if they
    are rows length to length + L of the buffers.
    """

    keys: mx.array
    values: mx.array
    length: int
    block: tuple[mx.array, mx.array] | None = None


@dataclass(frozen=True)
class Sight:
    """The keys that a query row sees. Row i of the block has position length + i.

    causal: block row i sees block rows 0 to i; otherwise it sees them all. window: a row sees only keys that are fewer
    than `window` positions away, in both directions; 0 for all keys.
    """

    causal: bool = False
    window: int = 0


@dataclass(frozen=True)
class Geometry:
    """The cut of a first pass into threadgroups, and of a threadgroup into simdgroups.

    row_groups, splits: threadgroups for the rows of one key/value head, and for its keys. row_tiles, d_slices,
    key_slices: simdgroups of a threadgroup for 8 query rows each, for slices of the head size, and for slices of a tile
    of keys_per_tile keys.
    """

    row_groups: int
    row_tiles: int
    d_slices: int
    key_slices: int
    keys_per_tile: int
    splits: int

    @property
    def simdgroups(self) -> int:
        """Number of simdgroups in a threadgroup."""
        return self.row_tiles * self.d_slices * self.key_slices


def row_step(rows: int) -> int:
    """Round a number of rows up to the power of two for which launches are compiled and verdicts hold."""
    return 1 << (rows - 1).bit_length()


def plan(q: mx.array, keys: Keys, sight: Sight, cores: int, simdgroups: int = SIMDGROUPS) -> Geometry:
    """Cut a call into one wave of two threadgroups for each core, without empty splits.

    simdgroups: the largest number of them in a threadgroup.
    """
    batch, heads, rows, head_size = q.shape
    kv_heads = keys.keys.shape[1]
    group = heads // kv_heads
    d_slices = 2 if head_size == 256 else 1
    compiled = -(-group * row_step(rows) // 8)  # tiles of 8 rows
    row_tiles = -(-compiled // -(-compiled // (simdgroups // d_slices)))
    row_groups = -(-group * rows // (8 * row_tiles))
    keys_per_tile = 8192 // (head_size * q.itemsize)
    key_slices = 1
    while 2 * row_tiles * d_slices * key_slices <= simdgroups and 16 * key_slices <= keys_per_tile:
        key_slices *= 2
    num_keys = rows + (min(keys.length, sight.window - 1) if sight.window else keys.length)
    wanted = min(2 * cores // (batch * kv_heads * row_groups), num_keys // KEYS_PER_SPLIT)
    share = -(-num_keys // max(1, wanted))
    share = -(-share // keys_per_tile) * keys_per_tile
    return Geometry(row_groups, row_tiles, d_slices, key_slices, keys_per_tile, splits=-(-num_keys // share))


def supports(q: mx.array, keys: Keys) -> bool:
    """Return whether the Metal kernel knows this head size and dtype."""
    alike = q.dtype in DTYPES and q.dtype == keys.keys.dtype == keys.values.dtype
    return alike and q.shape[-1] in HEAD_SIZES and q.shape[-1] == keys.values.shape[-1]


def attend_metal(
    q: mx.array,
    keys: Keys,
    sight: Sight,
    scale: float,
    sinks: mx.array | None = None,
    *,
    run: Runner,
    cores: int = 20,
    simdgroups: int = SIMDGROUPS,
) -> mx.array:
    """Compute attend_ops by the kernel. run: executes the launches. cores, simdgroups: see plan."""
    first = partial_call(q, keys, sight, scale, plan(q, keys, sight, cores, simdgroups))
    return run(merge_call(q, run(first), sinks))[0]


def partial_call(q: mx.array, keys: Keys, sight: Sight, scale: float, cut: Geometry) -> KernelCall:
    """Return the first pass: un-normalised results, maxima and denominators of every slice of keys."""
    batch, heads, rows, head_size = q.shape
    kv_heads = keys.keys.shape[1]
    block_keys, block_values = keys.block or (keys.keys, keys.values)
    slices, padded = cut.splits * cut.key_slices, cut.row_groups * cut.row_tiles * 8
    return KernelCall(
        "dflash_attention",
        metal_source("attention.metal"),
        inputs={
            "q": q,
            "keys": keys.keys,
            "values": keys.values,
            "block_keys": block_keys,
            "block_values": block_values,
            "length": mx.array([keys.length] * batch, mx.int32),
            "scale": mx.array([scale], mx.float32),
        },
        outputs={
            "partial": ((batch, kv_heads, slices, padded, head_size), mx.float32),
            "maximum": ((batch, kv_heads, slices, padded), mx.float32),
            "total": ((batch, kv_heads, slices, padded), mx.float32),
        },
        template={
            "T": q.dtype,
            "G": heads // kv_heads,
            "D": head_size,
            "RTG": cut.row_tiles,
            "DS": cut.d_slices,
            "KS": cut.key_slices,
            "BK": cut.keys_per_tile,
            "BLOCK": keys.block is not None,
            "CAUSAL": sight.causal,
            "WINDOW": sight.window,
        },
        grid=(kv_heads * cut.row_groups * cut.simdgroups * 32, batch, cut.splits),
        threadgroup=(cut.simdgroups * 32, 1, 1),
    )


def merge_call(q: mx.array, partials: list[mx.array], sinks: mx.array | None) -> KernelCall:
    """Return the second pass: one output array (B, Hq, L, d) from the slices of the first."""
    batch, heads, rows, head_size = q.shape
    kv_heads = partials[1].shape[1]
    return KernelCall(
        "dflash_attention_merge",
        metal_source("attention_merge.metal"),
        inputs=dict(zip(("partial", "maximum", "total"), partials))
        | {"sinks": mx.zeros((1,), mx.float32) if sinks is None else sinks},
        outputs={"out": ((batch, heads, rows, head_size), q.dtype)},
        template={"T": q.dtype, "G": heads // kv_heads, "D": head_size, "SINKS": sinks is not None},
        grid=(head_size, heads // kv_heads * rows, batch * kv_heads),
        threadgroup=(head_size, 1, 1),
    )


def attend_ops(q: mx.array, keys: Keys, sight: Sight, scale: float, sinks: mx.array | None = None) -> mx.array:
    """Compute the attention of a block over its context and itself in stock MLX operations.

    q: (B, Hq, L, d), rotated. scale: factor of the scores. sinks: (Hq,) extra logits, or None. Returns (B, Hq, L, d).
    Without keys.block it reads a view of the buffers and copies nothing.
    """
    rows = q.shape[2]
    num_rows = keys.length if keys.block else keys.length + rows  # of the buffers
    k, v = keys.keys[..., :num_rows, :], keys.values[..., :num_rows, :]
    if keys.block:
        k, v = (mx.concatenate([x, own], axis=2) for x, own in zip((k, v), keys.block))
    return STOCK(q, k, v, scale=scale, mask=block_mask(rows, keys.length, sight), sinks=sinks)


def block_mask(rows: int, length: int, sight: Sight) -> mx.array | str | None:
    """Return the mask that stock attention takes: None, "causal", or a (rows, length + rows) bool array."""
    if not sight.window or length + rows <= sight.window:
        return "causal" if sight.causal else None
    distance = mx.arange(length, length + rows)[:, None] - mx.arange(length + rows)[None]
    return (distance < sight.window) & (distance >= (0 if sight.causal else 1 - sight.window))
