"""Pairs that are built, not trained: a target, and a draft that is right at a chosen rate.

All matrices are dense and random, so every product costs what it costs in a trained pair of that shape. A few
structured components decide the tokens:

  target  The embedding of token t is [constant | a(t) | a(code(t))], with random vectors a and a random permutation
          code. The layers add little to it, and the head answers next(t), one random ring through the vocabulary.
  draft   A head of its first layer looks back a fixed distance, by the phases of its RoPE, and moves the second half
          of the context row that it finds there to where the target's head reads the first: it proposes
          next(code(token at that distance)).
  prompt  Its tokens are the codes of the text to come, some of them wrong. So where the draft errs is a property of
          the prompt, the same for every implementation, and no draft can be had by copying from the prompt.

Knows the formats of mlx-lm's models and of z-lab's drafts; knows nothing of generation.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

EOS, MASK, NUM_SPECIAL = 0, 1, 2
_CONSTANT = 4.0  # first component of every embedding; the draft finds its distance by it
_ROPE_THETA = 100_000.0
_RESIDUAL = 0.05  # what a random layer adds, against its input


@dataclass(frozen=True)
class PairShape:
    """Sizes of a pair.

    longest: most tokens that may be generated after a prompt, which has min_prompt tokens or more.
    """

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    num_draft_layers: int
    block_size: int = 16
    longest: int = 256

    @property
    def look_back(self) -> int:
        """Distance from a drafted token to its code in the prompt."""
        return self.longest + 4

    @property
    def min_prompt(self) -> int:
        return self.look_back + 8


SHAPES = {
    "tiny": PairShape(128, 4, 4, 2, 32, 256, 512, num_draft_layers=2, longest=64),
    "small": PairShape(576, 30, 9, 3, 64, 1536, 49152, num_draft_layers=4),
}


class ConstructedPair:
    """A pair of one shape: the same weights at every rate, for the rate is in the prompt."""

    def __init__(self, shape: PairShape, seed: int = 0):
        self.shape, self._seed = shape, seed
        random = np.random.default_rng(seed)
        ids = np.arange(NUM_SPECIAL, shape.vocab_size)
        ring = random.permutation(ids)
        self.next = np.full(shape.vocab_size, ring[0])
        self.next[ring] = np.roll(ring, -1)
        self.code = np.arange(shape.vocab_size)
        self.code[ids] = random.permutation(ids)

    def prompt(self, rate: float, length: int | None = None, seed: int = 0) -> list[int]:
        """Return prompt ids for which each draft is right with probability `rate`, independently of the others.

        length: tokens, the shortest possible if None. Raises ValueError for a rate outside 0 to 1 or a short length.
        """
        shape = self.shape
        length = shape.min_prompt if length is None else length
        if not 0 <= rate <= 1:
            raise ValueError(f"the rate of right drafts must be 0 to 1, got {rate}")
        if length < shape.min_prompt:
            raise ValueError(f"prompts of this pair have at least {shape.min_prompt} tokens, got {length}")
        random = np.random.default_rng([self._seed, seed])
        prompt = random.integers(NUM_SPECIAL, shape.vocab_size, length)
        is_right = random.random(shape.look_back) < rate
        encode = np.argsort(self.code)
        token = self.next[prompt[-1]]  # at position `length`, known before the first draft
        for i in range(1, shape.look_back - 1):
            if is_right[i]:
                prompt[length + i - shape.look_back] = encode[token]
            token = self.next[token]
        return prompt.tolist()

    def save(self, folder: str | Path) -> tuple[Path, Path]:
        """Write the two checkpoints under a folder, in float32; return the target's folder and the draft's."""
        target, draft = Path(folder) / "target", Path(folder) / "draft"
        random = np.random.default_rng([self._seed, 1])
        _save(target, self._target_config(), self._target_weights(random))
        _save_tokenizer(target, self.shape.vocab_size)
        _save(draft, self._draft_config(), self._draft_weights(random))
        return target, draft

    def _common_config(self) -> dict:
        s = self.shape
        return {
            "model_type": "qwen3",
            "hidden_size": s.hidden_size,
            "num_attention_heads": s.num_heads,
            "num_key_value_heads": s.num_kv_heads,
            "head_dim": s.head_dim,
            "intermediate_size": s.intermediate_size,
            "vocab_size": s.vocab_size,
            "rms_norm_eps": 1e-5,
            "rope_theta": _ROPE_THETA,
            "rope_scaling": None,
            "max_position_embeddings": 32768,
            "attention_bias": False,
            "tie_word_embeddings": False,
            "torch_dtype": "float32",
        }

    def _target_config(self) -> dict:
        return self._common_config() | {
            "architectures": ["Qwen3ForCausalLM"],
            "num_hidden_layers": self.shape.num_layers,
            "bos_token_id": EOS,
            "eos_token_id": EOS,
        }

    def _draft_config(self) -> dict:
        s = self.shape
        taps = np.linspace(1, s.num_layers - 3, s.num_draft_layers).round().astype(int).tolist()
        return self._common_config() | {
            "architectures": ["DFlashDraftModel"],
            "num_hidden_layers": s.num_draft_layers,
            "num_target_layers": s.num_layers,
            "block_size": s.block_size,
            "layer_types": ["full_attention"] * s.num_draft_layers,
            "sliding_window": None,
            "dflash_config": {"target_layer_ids": taps, "mask_token_id": MASK},
        }

    def _target_weights(self, random: np.random.Generator) -> dict[str, np.ndarray]:
        s = self.shape
        half = (s.hidden_size - 1) // 2
        vectors = random.standard_normal((s.vocab_size, half), dtype=np.float32)  # a(t)
        vectors[:NUM_SPECIAL] = 0
        embedding = np.zeros((s.vocab_size, s.hidden_size), np.float32)
        embedding[:, 0] = _CONSTANT
        embedding[:, 1 : 1 + half] = vectors
        embedding[:, 1 + half : 1 + 2 * half] = vectors[self.code]
        head = np.zeros_like(embedding)
        head[self.next[NUM_SPECIAL:], 1 : 1 + half] = vectors[NUM_SPECIAL:] / np.sqrt(half)
        weights = {
            "model.embed_tokens.weight": embedding,
            "model.norm.weight": np.ones(s.hidden_size),
            "lm_head.weight": head,
        }
        for i in range(s.num_layers):
            weights |= _layer(s, random, f"model.layers.{i}.")
        return weights

    def _draft_weights(self, random: np.random.Generator) -> dict[str, np.ndarray]:
        s = self.shape
        D = s.hidden_size
        average = np.hstack([np.eye(D) / s.num_draft_layers] * s.num_draft_layers)
        weights = {
            "fc.weight": average + _normal(random, D, D * s.num_draft_layers, scale=0.02),
            "hidden_norm.weight": np.ones(D),
            "norm.weight": np.ones(D),
        }
        for i in range(s.num_draft_layers):
            weights |= _layer(s, random, f"layers.{i}.")
        return weights | _copying_attention(s, random, "layers.0.self_attn.")


def expected_acceptance_length(rate: float, block_size: int) -> float:
    """Mean tokens a round of a draft whose tokens are right with probability `rate`, independently."""
    return sum(rate**i for i in range(block_size))


def _normal(random: np.random.Generator, rows: int, columns: int, scale: float = 1.0) -> np.ndarray:
    """Return (rows, columns) that turn a vector of unit components into one of components `scale`."""
    return random.standard_normal((rows, columns), dtype=np.float32) * (scale * columns**-0.5)


def _layer(s: PairShape, random: np.random.Generator, prefix: str) -> dict[str, np.ndarray]:
    """Return the weights of one random transformer layer."""
    D, inner, Q, K = s.hidden_size, s.intermediate_size, s.num_heads * s.head_dim, s.num_kv_heads * s.head_dim
    weights = {
        "self_attn.q_proj": _normal(random, Q, D),
        "self_attn.k_proj": _normal(random, K, D),
        "self_attn.v_proj": _normal(random, K, D),
        "self_attn.o_proj": _normal(random, D, Q, scale=_RESIDUAL),
        "self_attn.q_norm": np.ones(s.head_dim),
        "self_attn.k_norm": np.ones(s.head_dim),
        "mlp.gate_proj": _normal(random, inner, D),
        "mlp.up_proj": _normal(random, inner, D),
        "mlp.down_proj": _normal(random, D, inner, scale=2 * _RESIDUAL),
        "input_layernorm": np.ones(D),
        "post_attention_layernorm": np.ones(D),
    }
    return {f"{prefix}{name}.weight": weight for name, weight in weights.items()}


def _copying_attention(s: PairShape, random: np.random.Generator, prefix: str) -> dict[str, np.ndarray]:
    """Weights of an attention whose heads look `look_back` positions back and copy the second half of what is there.

    Queries and keys are constants but for a little randomness. RoPE turns both by their positions, and the query also
    by the look-back, so their product is greatest where the phases of all frequencies meet: at that distance.
    """
    D, Q, K, d = s.hidden_size, s.num_heads * s.head_dim, s.num_kv_heads * s.head_dim, s.head_dim
    half = (D - 1) // 2
    frequencies = _ROPE_THETA ** (-np.arange(d // 2) / (d // 2))
    # Slow phases hardly tell neighbours apart.
    gain = np.tile(np.where(np.arange(d // 2) < d * 5 // 16, 10.0, 0.3), 2)
    query, key = _normal(random, Q, D, scale=0.002), _normal(random, K, D, scale=0.002)
    query[:, 0] += np.tile(
        np.concatenate([np.cos(frequencies * s.look_back), -np.sin(frequencies * s.look_back)]), s.num_heads
    )
    key[:, 0] += np.tile(np.concatenate([np.ones(d // 2), np.zeros(d // 2)]), s.num_kv_heads)
    value, out = _normal(random, K, D, scale=0.02), _normal(random, D, Q, scale=0.02)
    group = s.num_heads // s.num_kv_heads
    for i in range(min(half, K)):
        value[i, 1 + half + i] += 1
        kv_head, row = divmod(i, d)
        out[1 + i, [(kv_head * group + g) * d + row for g in range(group)]] += 4 / group
    weights = {"q_proj": query, "k_proj": key, "v_proj": value, "o_proj": out, "q_norm": gain, "k_norm": gain}
    return {f"{prefix}{name}.weight": weight for name, weight in weights.items()}


def _save(folder: Path, config: dict, weights: dict[str, np.ndarray]) -> None:
    import mlx.core as mx

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    arrays = {name: mx.array(weight.astype(np.float32)) for name, weight in weights.items()}
    mx.save_safetensors(str(folder / "model.safetensors"), arrays, {"format": "mlx"})


def _save_tokenizer(folder: Path, vocab_size: int) -> None:
    """Write a tokenizer that writes token 17 as " 17". It reads no text: prompts of these pairs are ids."""
    from tokenizers import AddedToken, Tokenizer, decoders, models

    special = ["<|end|>", "<|mask|>"]
    words = special + [f"\u0120{i}" for i in range(NUM_SPECIAL, vocab_size)]  # \u0120: a space, in byte-level spelling
    tokenizer = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, []))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(word, special=True) for word in special])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": special[0],
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
