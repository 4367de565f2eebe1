"""The DFlash draft network (versions 1 and 2) in MLX modules, with the tensor names of z-lab's checkpoints.

It reads no text. Each layer attends from a block [anchor, mask, mask, ...] to context K/V, which are projected from
the target's hidden states with the layer's own k_proj and v_proj, and to the block itself.
Knows its configuration and its context caches; knows nothing of targets, sampling or rounds.
Source: DFlash, block diffusion for flash speculative decoding (z-lab), and the layout of its public checkpoints.
"""

import weakref
from collections.abc import Callable, Collection
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.activations import swiglu

from ..caches.growing import GrowingKVCache
from ..caches.windowed import WindowedKVCache
from ..kernels import Kernels, Sight
from .config import SLIDING, DraftConfig
from .conv import GroupedDynamicConv, convolve
from .rope import make_rope
from .selector import CandidateSelector

ContextCache = GrowingKVCache | WindowedKVCache


class Attention(nn.Module):
    """Attention of one draft layer: block queries over context K/V and block K/V."""

    def __init__(self, config: DraftConfig, layer: int, kernels: Kernels):
        super().__init__()
        self.kernels = kernels
        self.num_heads, self.num_kv_heads = config.num_heads, config.num_kv_heads
        self.head_dim = config.head_dim
        window = config.sliding_window if config.layer_types[layer] == SLIDING else 0
        self.sight = Sight(causal=config.is_causal[layer], window=window)
        H, d, bias = config.hidden_size, config.head_dim, config.attention_bias
        self.q_proj = nn.Linear(H, self.num_heads * d, bias=bias)
        self.k_proj = nn.Linear(H, self.num_kv_heads * d, bias=bias)
        self.v_proj = nn.Linear(H, self.num_kv_heads * d, bias=bias)
        self.o_proj = nn.Linear(self.num_heads * d, H, bias=bias)
        self.q_norm = nn.RMSNorm(d, eps=config.rms_norm_eps)
        self.k_norm = nn.RMSNorm(d, eps=config.rms_norm_eps)
        self.value_scale = config.value_scale
        if config.has_sinks:
            self.attention_sink_bias = mx.zeros((self.num_heads,))

    def __call__(self, x: mx.array, rope: nn.Module, cache: ContextCache) -> mx.array:
        """Attend from normed block rows x (1, L, H). Returns (1, L, H). The block's K/V stay uncommitted."""
        queries, *block = self.project(x, rope, cache.offset)
        sinks = self.get("attention_sink_bias")
        out = self.kernels.attend_block(
            queries, tuple(block), cache, self.sight, self.head_dim**-0.5, sinks
        )  # (1, A, L, d)
        return self.o_proj(out.transpose(0, 2, 1, 3).reshape(1, x.shape[1], -1))

    def project(self, x: mx.array, rope: nn.Module, offset: int | mx.array) -> tuple[mx.array, mx.array, mx.array]:
        """Return queries (B, A, L, d), keys and values (B, K, L, d) of normed rows (B, L, H), rotated.

        offset: position of the first row, one for all or (B,).
        """
        B, L, _ = x.shape
        queries, keys, values = (
            projection(x).reshape(B, L, heads, self.head_dim)
            for projection, heads in (
                (self.q_proj, self.num_heads),
                (self.k_proj, self.num_kv_heads),
                (self.v_proj, self.num_kv_heads),
            )
        )
        queries = rope(self.q_norm(queries).transpose(0, 2, 1, 3), offset=offset)
        keys = rope(self.k_norm(keys).transpose(0, 2, 1, 3), offset=offset)
        return queries, keys, _scaled(values.transpose(0, 2, 1, 3), self.value_scale)


def _scaled(x: mx.array, scale: float) -> mx.array:
    return x if scale == 1.0 else x * scale


class MLP(nn.Module):
    """The gated MLP of one draft layer."""

    def __init__(self, config: DraftConfig):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def __call__(self, x: mx.array) -> mx.array:
        return self.down_proj(swiglu(self.gate_proj(x), self.up_proj(x)))


class DraftLayer(nn.Module):
    """One draft layer: attention and MLP, each with its norm and, in DFlash 2, its convolutions."""

    def __init__(self, config: DraftConfig, layer: int, kernels: Kernels):
        super().__init__()
        self.self_attn = Attention(config, layer, kernels)
        self.mlp = MLP(config)
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        if config.version == 2:
            sizes = config.hidden_size, config.conv_kernel_size, config.conv_group_size
            self.attention_conv, self.mlp_conv = GroupedDynamicConv(*sizes), GroupedDynamicConv(*sizes)

    def __call__(self, x: mx.array, rope: nn.Module, cache: ContextCache) -> mx.array:
        """Apply the layer to the block x (1, L, H). Returns (1, L, H)."""
        return self.around(x, lambda h: self.self_attn(h, rope, cache))

    def around(self, x: mx.array, attend: Callable[[mx.array], mx.array]) -> mx.array:
        """Apply the layer to x (B, L, H), with `attend` as its attention of normed rows. Returns (B, L, H)."""
        x = x + self._mixed("attention_conv", self.input_layernorm(x), attend)
        return x + self._mixed("mlp_conv", self.post_attention_layernorm(x), self.mlp)

    def _mixed(self, conv: str, x: mx.array, sublayer: Callable[[mx.array], mx.array]) -> mx.array:
        """Apply the sublayer; in DFlash 2, between two convolutions."""
        if conv not in self:
            return sublayer(x)
        before, after = self[conv].kernels(x)
        return convolve(sublayer(convolve(x, before)), after)


class KnownTargets:
    """Room for what pairs learn of a draft with each of its targets, kept no longer than the target lives.

    mlx-lm's functions take two models, not a pair; here a second call finds what the first one has learned.
    """

    def __init__(self):
        self._entries: list[tuple[weakref.ref, Any]] = []

    def get(self, model: nn.Module) -> Any:
        """Return what is known of a target, or None."""
        return next((known for target, known in self._entries if target() is model), None)

    def add(self, model: nn.Module, known: Any) -> None:
        """Keep what is known of a target until it is gone."""
        self._entries = [(target, kept) for target, kept in self._entries if target() is not None]
        self._entries.append((weakref.ref(model), known))


class DraftModel(nn.Module):
    """A DFlash draft: fc and hidden_norm make context rows of target features, layers turn a block into hidden rows.

    parts: those of OPTIONAL_PARTS that the checkpoint has. mask_embedding (H,) fills the mask slots in place of the
    embedding of the mask token. embed_tokens and lm_head stand in for the target's. d2t (Vd,) int makes the head a
    reduced one: its row i is token i + d2t[i]. kernels: runs the block's attention; None for stock MLX operations.
    known_targets: a slot for pair.py, which the network itself does not read.
    """

    OPTIONAL_PARTS = ("mask_embedding", "embed_tokens", "lm_head", "d2t")

    def __init__(self, config: DraftConfig, parts: Collection[str] = (), kernels: Kernels | None = None):
        super().__init__()
        self.config = config
        self.kernels = kernels or Kernels("off")
        H = config.hidden_size
        self.fc = nn.Linear(len(config.target_layer_ids) * config.target_hidden_size, H, bias=False)
        self.hidden_norm = nn.RMSNorm(H, eps=config.rms_norm_eps)
        self.layers = [DraftLayer(config, i, self.kernels) for i in range(config.num_layers)]
        self.norm = nn.RMSNorm(H, eps=config.rms_norm_eps)
        if config.version == 2:
            self.candidate_selector = CandidateSelector(
                H, config.vocab_size, config.selector_rank, config.selector_top_k
            )
        if "mask_embedding" in parts:
            self.mask_embedding = mx.zeros((H,))
        if "embed_tokens" in parts:
            self.embed_tokens = nn.Embedding(config.vocab_size, H)
        if "lm_head" in parts:
            self.lm_head = nn.Linear(H, config.draft_vocab_size, bias=False)
        if "d2t" in parts:
            self.d2t = mx.zeros((config.draft_vocab_size,), mx.int32)
        self._rope = make_rope(config)
        self._fused_kv = None
        self.known_targets = KnownTargets()

    @property
    def token_ids(self) -> mx.array | None:
        """(Vd,) uint32, the token of each row of a reduced head; None where the head has every token."""
        return (self.d2t + mx.arange(self.d2t.size)).astype(mx.uint32) if "d2t" in self else None

    @property
    def dtype(self) -> mx.Dtype:
        """Element type of the activations."""
        return self.norm.weight.dtype

    def make_cache(self) -> list[ContextCache]:
        """Return empty context caches, one a layer."""
        return [
            GrowingKVCache()
            if kind != SLIDING
            else WindowedKVCache(self.config.sliding_window, slack=2 * self.config.block_size)
            for kind in self.config.layer_types
        ]

    def fuse_context_projection(self) -> None:
        """Let one matrix product project the context K/V of all layers.

        The layers' k_proj and v_proj become views of the fused matrix, so no weight is held twice. Does nothing where
        the projections differ in kind. Call it once the weights are final.
        """
        attention = [layer.self_attn for layer in self.layers]
        self._fused_kv = _fuse([p for a in attention for p in (a.k_proj, a.v_proj)])

    def project_context(self, features: mx.array, caches: list[ContextCache]) -> None:
        """Append the context K/V of committed tokens to all layers' caches.

        features: (1, S, T * D), the tap layers' outputs, concatenated in the order of target_layer_ids.
        Raises ValueError if their width is not the one the draft was trained on.
        """
        wanted = len(self.config.target_layer_ids) * self.config.target_hidden_size
        if features.shape[-1] != wanted:
            raise ValueError(
                f"the draft expects context features of width {wanted} "
                f"({len(self.config.target_layer_ids)} tap layers x {self.config.target_hidden_size}), "
                f"got {features.shape[-1]}; was it trained for another target?"
            )
        keys, values = self.context_kv(features, caches[0].offset)
        for i, cache in enumerate(caches):
            cache.update_and_fetch(keys[i : i + 1], values[i : i + 1])

    def context_kv(self, features: mx.array, offset: int = 0) -> tuple[mx.array, mx.array]:
        """Return context keys and values (N, K, S, d) of all N layers.

        features: (1, S, T * D). offset: the position of their first row.
        """
        h = self.hidden_norm(self.fc(features.astype(self.dtype)))  # (1, S, H)
        N, K, d, S = self.config.num_layers, self.config.num_kv_heads, self.config.head_dim, h.shape[1]
        if self._fused_kv is not None:
            kv = self._fused_kv(h)
        else:
            kv = mx.concatenate(
                [p(h) for a in (layer.self_attn for layer in self.layers) for p in (a.k_proj, a.v_proj)], axis=-1
            )
        kv = kv.reshape(S, N, 2, K, d).transpose(2, 1, 3, 0, 4)  # (2, N, K, S, d)
        weights = mx.stack([layer.self_attn.k_norm.weight for layer in self.layers]).reshape(N, 1, 1, d)
        keys = mx.fast.rms_norm(kv[0], None, self.config.rms_norm_eps) * weights
        return self._rope(keys, offset=offset), _scaled(kv[1], self.config.value_scale)

    def __call__(self, block: mx.array, caches: list[ContextCache]) -> mx.array:
        """Return the hidden rows (1, L, H) after the final norm. block: (1, L, H) embeddings of [anchor, mask, ...]."""
        x = block.astype(self.dtype)
        for layer, cache in zip(self.layers, caches):
            x = layer(x, self._rope, cache)
        return self.norm(x)


def _fuse(projections: list[nn.Module]) -> nn.Module | None:
    """Return one projection whose output is the concatenation of theirs, sharing its weights with them; or None."""
    kinds = {
        (
            type(p),
            p.weight.dtype,
            getattr(p, "bits", None),
            getattr(p, "group_size", None),
            getattr(p, "mode", None),
            frozenset(p),
        )
        for p in projections
    }
    if len(kinds) > 1:
        return None
    fused = type(projections[0]).__new__(type(projections[0]))
    fused.__dict__.update(projections[0].__dict__)
    for name, value in projections[0].items():
        if not isinstance(value, mx.array):
            fused[name] = value
            continue
        fused[name] = mx.concatenate([p[name] for p in projections])
        mx.eval(fused[name])
        start = 0
        for p in projections:
            rows = p[name].shape[0]
            p[name] = fused[name][start : start + rows]
            start += rows
        # Evaluated here: what is left pending can only be computed in the thread that made it.
        mx.eval([p[name] for p in projections])
    return fused
