"""The DFlash draft network (version 1) in MLX modules, with the tensor names of z-lab's checkpoints.

It reads no text. Each layer attends from a block [anchor, mask, mask, ...] to context K/V, which are projected from
the target's hidden states with the layer's own k_proj and v_proj, and to the block itself.
Knows its configuration and its context caches; knows nothing of targets, sampling or rounds.
Source: DFlash, block diffusion for flash speculative decoding (z-lab), and the layout of its public checkpoints.
"""

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.activations import swiglu
from mlx_lm.models.rope_utils import initialize_rope

from ..cache import GrowingKVCache, WindowedKVCache
from ..kernels import Kernels, Sight
from .config import SLIDING, DraftConfig

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

    def __call__(self, x: mx.array, rope: nn.Module, cache: ContextCache) -> mx.array:
        """x: (1, L, H), normed block rows. Returns (1, L, H). The block's K/V stay uncommitted."""
        L = x.shape[1]
        queries, keys, values = (
            projection(x).reshape(1, L, heads, self.head_dim)
            for projection, heads in (
                (self.q_proj, self.num_heads),
                (self.k_proj, self.num_kv_heads),
                (self.v_proj, self.num_kv_heads),
            )
        )
        queries = rope(self.q_norm(queries).transpose(0, 2, 1, 3), offset=cache.offset)  # (1, A, L, d)
        keys = rope(self.k_norm(keys).transpose(0, 2, 1, 3), offset=cache.offset)  # (1, K, L, d)
        block = (keys, values.transpose(0, 2, 1, 3))  # (1, K, L, d) each
        out = self.kernels.attend_block(queries, block, cache, self.sight, self.head_dim**-0.5)  # (1, A, L, d)
        return self.o_proj(out.transpose(0, 2, 1, 3).reshape(1, L, -1))


class MLP(nn.Module):
    def __init__(self, config: DraftConfig):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def __call__(self, x: mx.array) -> mx.array:
        return self.down_proj(swiglu(self.gate_proj(x), self.up_proj(x)))


class DraftLayer(nn.Module):
    def __init__(self, config: DraftConfig, layer: int, kernels: Kernels):
        super().__init__()
        self.self_attn = Attention(config, layer, kernels)
        self.mlp = MLP(config)
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def __call__(self, x: mx.array, rope: nn.Module, cache: ContextCache) -> mx.array:
        x = x + self.self_attn(self.input_layernorm(x), rope, cache)
        return x + self.mlp(self.post_attention_layernorm(x))


class DraftModel(nn.Module):
    """A DFlash 1 draft: fc and hidden_norm make context rows out of target features, layers turn a block into hidden rows.

    mask_embedding: (H,) row that fills the mask slots in place of the target's embedding of the mask token; None
    where the checkpoint has none. kernels: runs the block's attention; without it, stock MLX operations do.
    """

    def __init__(self, config: DraftConfig, has_mask_embedding: bool = False, kernels: Kernels | None = None):
        super().__init__()
        self.config = config
        self.kernels = kernels or Kernels("off")
        self.fc = nn.Linear(len(config.target_layer_ids) * config.target_hidden_size, config.hidden_size, bias=False)
        self.hidden_norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.layers = [DraftLayer(config, i, self.kernels) for i in range(config.num_layers)]
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        if has_mask_embedding:
            self.mask_embedding = mx.zeros((config.hidden_size,))
        self._rope = initialize_rope(
            config.head_dim, config.rope_theta, False, config.rope_scaling, config.max_position_embeddings
        )
        self._fused_kv = None
        self._round_seconds: dict[int, float] = {}

    @property
    def round_seconds(self) -> dict[int, float]:
        """Seconds of a round by its number of drafts, as far as they were measured with the latest target."""
        return self._round_seconds

    @property
    def dtype(self) -> mx.Dtype:
        """Element type of the activations."""
        return self.norm.weight.dtype

    def make_cache(self) -> list[ContextCache]:
        """Return empty context caches, one a layer."""
        return [
            GrowingKVCache() if kind != SLIDING else WindowedKVCache(self.config.sliding_window, slack=2 * self.config.block_size)
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
        h = self.hidden_norm(self.fc(features.astype(self.dtype)))  # (1, S, H)
        keys, values = self._context_kv(h)
        keys = self._rope(keys, offset=caches[0].offset)
        for i, cache in enumerate(caches):
            cache.update_and_fetch(keys[i : i + 1], values[i : i + 1])

    def _context_kv(self, h: mx.array) -> tuple[mx.array, mx.array]:
        """Project h (1, S, H) to normed keys and values (N, K, S, d) of all N layers, before RoPE."""
        N, K, d, S = self.config.num_layers, self.config.num_kv_heads, self.config.head_dim, h.shape[1]
        if self._fused_kv is not None:
            kv = self._fused_kv(h)
        else:
            kv = mx.concatenate([p(h) for a in (layer.self_attn for layer in self.layers) for p in (a.k_proj, a.v_proj)], axis=-1)
        kv = kv.reshape(S, N, 2, K, d).transpose(2, 1, 3, 0, 4)  # (2, N, K, S, d)
        weights = mx.stack([layer.self_attn.k_norm.weight for layer in self.layers]).reshape(N, 1, 1, d)
        return mx.fast.rms_norm(kv[0], None, self.config.rms_norm_eps) * weights, kv[1]

    def __call__(self, block: mx.array, caches: list[ContextCache]) -> mx.array:
        """block: (1, L, H) embeddings of [anchor, mask, ...]. Returns (1, L, H), hidden rows after the final norm."""
        x = block.astype(self.dtype)
        for layer, cache in zip(self.layers, caches):
            x = layer(x, self._rope, cache)
        return self.norm(x)


def _fuse(projections: list[nn.Module]) -> nn.Module | None:
    """Return one projection whose output is the concatenation of theirs, sharing its weights with them; or None."""
    kinds = {(type(p), p.weight.dtype, getattr(p, "bits", None), getattr(p, "group_size", None), getattr(p, "mode", None), frozenset(p)) for p in projections}
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
