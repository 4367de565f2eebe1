"""Tiny models, tokenizers, checkpoints and a draft that knows the answer, for every test.

All weights are drawn by numpy's RandomState, so they are the same on every machine. Nothing here imports
the product, needs the network, or takes longer than a second.
"""

import importlib
import json
from pathlib import Path

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.generate import generate_step
from mlx_lm.tokenizer_utils import BPEStreamingDetokenizer, TokenizerWrapper

VOCAB_SIZE = 97
MASK_ID = 96
BYTE_VOCAB_SIZE = 258
BOS_ID, EOS_ID = 256, 257

_LLAMA = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-6,
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "rope_theta": 10000.0,
}

_TARGETS = {
    "qwen3": {**_LLAMA, "model_type": "qwen3"},
    "llama": {**_LLAMA, "model_type": "llama"},
    # Sliding layers around a full one, and a window that a short prompt already fills.
    "llama_sliding": {
        **_LLAMA,
        "model_type": "llama",
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    # Gated delta, gated delta, gated delta, attention.
    "qwen3_5": {
        **_LLAMA,
        "model_type": "qwen3_5",
        "hidden_size": 64,
        "head_dim": 16,
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
        "linear_conv_kernel_dim": 4,
        "full_attention_interval": 4,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.5,
        },
    },
    # Sliding, full, sliding, full.
    "gemma3_text": {
        **_LLAMA,
        "model_type": "gemma3_text",
        "query_pre_attn_scalar": 8,
        "sliding_window": 8,
        "sliding_window_pattern": 2,
    },
}
TARGET_FAMILIES = tuple(_TARGETS)


def target_config(family="qwen3", **changes):
    """The Hugging Face config of a tiny target, a fresh dict. changes: keys to replace; None removes a key.

    family: one of TARGET_FAMILIES: qwen3 (4 layers, hidden 32, 4 heads, 2 KV heads, vocabulary 97), llama,
    llama_sliding (window 8, sliding and full in turn), qwen3_5 (3 gated-delta layers and one attention
    layer, hidden 64) and gemma3_text (window 8, sliding and full in turn).
    """
    return _changed(_TARGETS[family], changes)


def build_target(config, seed=0, dtype=mx.float32, scale=0.3):
    """An mlx-lm model of this config with seeded normal weights, evaluated, in eval mode."""
    module = importlib.import_module(f"mlx_lm.models.{config['model_type']}")
    # A copy: some mlx-lm configs rewrite the dicts they are given.
    args = module.ModelArgs.from_dict(json.loads(json.dumps(config)))
    model = module.Model(args)
    rng = np.random.RandomState(seed)
    weights = {}
    for name, value in sorted(tree_flatten(model.parameters())):
        noise = rng.standard_normal(value.shape)
        if name.endswith("A_log"):
            array = np.log(1 + np.abs(noise))
        elif value.ndim > 1:
            array = scale * noise
        else:  # Norms stay near what they start as, one or (Gemma's centred ones) zero.
            array = float(value.reshape(-1)[0]) + 0.1 * noise
        weights[name] = mx.array(array.astype(np.float32)).astype(dtype)
    model.update(tree_unflatten(list(weights.items())))
    model.eval()
    mx.eval(model.parameters())
    return model


def tiny_target(family="qwen3", seed=0, dtype=mx.float32, **changes):
    """build_target(target_config(family, **changes)): the common case in one call."""
    return build_target(target_config(family, **changes), seed=seed, dtype=dtype)


def context_free_target(probabilities, seed=0):
    """A qwen3 whose next-token distribution is `probabilities` (V,), all positive, at every position.

    All embedding rows are equal and no layer adds anything, so the normed hidden state h is constant,
    and head row v is log p(v) * h / (h . h). The class is mlx-lm's own.
    """
    log_p = np.log(np.asarray(probabilities, dtype=np.float64))
    model = tiny_target(seed=seed, vocab_size=len(log_p))
    table = model.model.embed_tokens.weight
    model.model.embed_tokens.weight = mx.broadcast_to(table[:1], table.shape)
    for layer in model.layers:
        for linear in (layer.self_attn.o_proj, layer.mlp.down_proj):
            linear.weight = mx.zeros_like(linear.weight)
    h = np.array(model.model.norm(table[0]), dtype=np.float64)
    model.lm_head.weight = mx.array(np.outer(log_p, h / (h @ h)).astype(np.float32))
    mx.eval(model.parameters())
    return model


def tied_rows_target(prompt, seed=0, num_tokens=64):
    """A bfloat16 qwen3 with two identical head rows: returns (model, lower id, higher id).

    The lower id is one that plain greedy decoding of `prompt` really emits, so exact ties for the first
    place occur, and the lower id must win every one of them.
    """
    model = tiny_target(seed=seed, dtype=mx.bfloat16)
    emitted = [t for t in plain_tokens(model, prompt, num_tokens) if t < VOCAB_SIZE - 2]
    lower = max(set(emitted), key=emitted.count)
    rows = mx.arange(VOCAB_SIZE)
    model.lm_head.weight = model.lm_head.weight[mx.where(rows == lower + 1, lower, rows)]
    mx.eval(model.parameters())
    return model, lower, lower + 1


def target_weights(model):
    """The parameters of an mlx-lm model as name -> float32 numpy array (Hugging Face names)."""
    return {n: np.array(v.astype(mx.float32)) for n, v in tree_flatten(model.parameters())}


def plain_tokens(model, prompt, n, sampler=None, seed=None, **kwargs):
    """The n tokens that mlx_lm.generate_step emits behind `prompt` (a list of ids). Seeds mx.random if told to."""
    if seed is not None:
        mx.random.seed(seed)
    steps = generate_step(mx.array(prompt), model, max_tokens=n, sampler=sampler, **kwargs)
    return [int(token) for token, _ in steps]


def draft_config(dflash=None, **changes):
    """The config.json of a tiny DFlash 1 draft, as published; a fresh dict.

    Two full layers on hidden 32, taps [0, 2] of 4, block 6, mask id 96. dflash: changes inside
    dflash_config; changes: keys beside it. None removes a key.
    """
    top = {
        **_LLAMA,
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "hidden_act": "silu",
        "attention_bias": False,
        "num_hidden_layers": 2,
        "num_target_layers": 4,
        "layer_types": ["full_attention", "full_attention"],
        "dtype": "float32",
    }
    nested = {"target_layer_ids": [0, 2], "mask_token_id": MASK_ID, "block_size": 6}
    config = _changed(top, {"dflash_config": _changed(nested, dflash or {}), **changes})
    if "sliding_attention" in config.get("layer_types", []):
        config.setdefault("sliding_window", 8)
        config.setdefault("use_sliding_window", True)
    return config


def draft_weights(config, seed=1, scale=0.3, mask_embedding=False):
    """Seeded float32 weights for a draft config: z-lab tensor name -> array.

    With attention_bias in the config also the biases; with mask_embedding=True a learned mask vector.
    """
    rng = np.random.RandomState(seed)
    weights = {}
    for name, shape in draft_shapes(config).items():
        noise = rng.standard_normal(shape)
        is_norm = name.endswith("norm.weight")
        weights[name] = (1 + 0.1 * noise if is_norm else scale * noise).astype(np.float32)
    if mask_embedding:
        weights["mask_embedding"] = rng.standard_normal(config["hidden_size"]).astype(np.float32)
    return weights


def draft2_config(dflash=None, **changes):
    """The config.json of a tiny DFlash 2 draft: draft_config with convolutions (2 taps, groups of 4) and a selector."""
    version_2 = {"conv_kernel_size": 2, "conv_group_size": 4, "selector_rank": 5, "selector_top_k": 4}
    return draft_config(
        {**version_2, **(dflash or {})}, **{"architectures": ["DFlash2DraftModel"], "is_causal": False, **changes}
    )


def draft_shapes(config):
    """Tensor name -> shape of a DFlash checkpoint, in z-lab's order and names: version 2 if it has a selector."""
    hidden, wide = config["hidden_size"], config["intermediate_size"]
    d = config.get("head_dim") or hidden // config["num_attention_heads"]
    q_rows, kv_rows = config["num_attention_heads"] * d, config["num_key_value_heads"] * d
    taps = config["dflash_config"].get("target_layer_ids", config.get("target_layer_ids"))
    target_hidden = config.get("target_hidden_size", hidden)
    shapes = {"fc.weight": (hidden, len(taps) * target_hidden)}
    shapes |= {"hidden_norm.weight": (hidden,), "norm.weight": (hidden,)}
    for i in range(config["num_hidden_layers"]):
        attention, mlp = f"layers.{i}.self_attn.", f"layers.{i}.mlp."
        shapes[f"layers.{i}.input_layernorm.weight"] = (hidden,)
        shapes[f"layers.{i}.post_attention_layernorm.weight"] = (hidden,)
        projections = {"q": (q_rows, hidden), "k": (kv_rows, hidden), "v": (kv_rows, hidden), "o": (hidden, q_rows)}
        for letter, shape in projections.items():
            shapes[f"{attention}{letter}_proj.weight"] = shape
            if config.get("attention_bias"):
                shapes[f"{attention}{letter}_proj.bias"] = shape[:1]
        shapes |= {f"{attention}q_norm.weight": (d,), f"{attention}k_norm.weight": (d,)}
        shapes |= {f"{mlp}gate_proj.weight": (wide, hidden), f"{mlp}up_proj.weight": (wide, hidden)}
        shapes[f"{mlp}down_proj.weight"] = (hidden, wide)
        if config["dflash_config"].get("attention_sink_bias"):
            shapes[f"{attention}attention_sink_bias"] = (config["num_attention_heads"],)
    return shapes | _version_2_shapes(config, hidden)


def _version_2_shapes(config, hidden):
    sizes = config["dflash_config"]
    if "selector_rank" not in sizes:
        return {}
    taps, groups, rank = sizes["conv_kernel_size"], hidden // sizes["conv_group_size"], sizes["selector_rank"]
    shapes = {}
    for i in range(config["num_hidden_layers"]):
        for conv in ("attention_conv", "mlp_conv"):
            shapes[f"layers.{i}.{conv}.base_kernel"] = (2, taps, hidden)
            shapes[f"layers.{i}.{conv}.kernel_projection.weight"] = (2 * taps * groups, hidden)
    shapes["candidate_selector.hidden_projection.weight"] = (rank, hidden)
    for side in ("predecessor", "successor"):
        shapes[f"candidate_selector.{side}_codebook"] = (config["vocab_size"], rank)
    return shapes


def draft_inputs(config, num_context, seed=2):
    """Seeded float32 features (P, T*D), embedding table (V, D) and head (V, D) for a draft of this config."""
    rng = np.random.RandomState(seed)
    table_shape = config["vocab_size"], config["hidden_size"]
    embed, head = rng.standard_normal(table_shape), 0.3 * rng.standard_normal(table_shape)
    features = rng.standard_normal((num_context, draft_shapes(config)["fc.weight"][1]))
    return tuple(array.astype(np.float32) for array in (features, embed, head))


class OracleDrafter:
    """A drafter that knows the text and spoils its proposals so that each round accepts a chosen number.

    prompt, continuation: the tokens before, and those that the target emits. accepts: how many drafts each
    round keeps, an int for all rounds or a list that is repeated; None keeps all. inner: a real drafter,
    which then sees and computes everything, while its proposals are thrown away.
    """

    def __init__(self, prompt, continuation, accepts=None, num_drafts=5, inner=None):
        self.num_drafts = num_drafts
        self.context_length = 0
        self.proposals = []  # One (anchor, drafts) a proposal, for tests to look at.
        self._text = [*prompt, *continuation]
        self._accepts = [num_drafts] if accepts is None else np.atleast_1d(accepts).tolist()
        self._inner = inner

    def extend_context(self, features):
        """Count the committed rows of features (1, S, T*D)."""
        self.context_length += features.shape[1]
        if self._inner is not None:
            self._inner.extend_context(features)

    def can_rewind(self, length):
        return self._inner is None or self._inner.can_rewind(length)

    def rewind(self, length):
        """Go back to a context of the first `length` tokens."""
        self.context_length = length
        if self._inner is not None:
            self._inner.rewind(length)

    def settle(self):
        """Evaluate what is pending."""
        if self._inner is not None:
            self._inner.settle()

    def propose(self, anchor, num_drafts=None):
        """The text behind the anchor (γ,) uint32, wrong at the slot where this round shall end.

        Raises AssertionError if the anchor is not the token right behind the context.
        """
        num_drafts = self.num_drafts if num_drafts is None else min(num_drafts, self.num_drafts)
        anchor, at = int(anchor), self.context_length
        if self._inner is not None:
            self._inner.propose(anchor, num_drafts)
        if num_drafts == 0:
            return mx.zeros((0,), dtype=mx.uint32)
        expected = self._text[at] if at < len(self._text) else None
        if anchor != expected:
            raise AssertionError(
                f"anchor {anchor} behind {at} context rows, but the text has {expected} there: the context "
                "must cover every token but the last"
            )
        keep = self._accepts[len(self.proposals) % len(self._accepts)]
        known = self._text[at + 1 : at + 1 + num_drafts]
        drafts = known + [0] * (num_drafts - len(known))
        if keep < num_drafts:
            drafts[keep] = 1 if drafts[keep] == 0 else 0
        self.proposals.append((anchor, drafts))
        return mx.array(drafts, dtype=mx.uint32)


def byte_tokenizer(bos=False, bos_in_prompt=False, eos=True, chat_template=None):
    """A tokenizer with one id a byte (id = byte value), no merges, in mlx-lm's wrapper with its detokenizer.

    bos: declare <bos> (256); bos_in_prompt: and put it in front of every encoded text. eos: declare <eos>
    (257). Both ids exist in any case. chat_template: Jinja text.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE(vocab=_byte_symbols(), merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<bos>", special=True), AddedToken("<eos>", special=True)])
    if bos_in_prompt:
        tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", BOS_ID)])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<bos>" if bos or bos_in_prompt else None,
        eos_token="<eos>" if eos else None,
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = chat_template
    return TokenizerWrapper(fast, BPEStreamingDetokenizer)


CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
BOS_CHAT_TEMPLATE = "{{ bos_token }}" + CHAT_TEMPLATE


def save_target(folder, model, config, tokenizer=None, shards=1):
    """Write a target as a Hugging Face folder that mlx_lm.load reads. Returns the folder as a Path."""
    folder = save_checkpoint(folder, config, dict(tree_flatten(model.parameters())), shards=shards)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    return folder


def save_draft(folder, config, weights, dtype=mx.float32, prefix="", shards=1):
    """Write a draft as a Hugging Face folder in z-lab's layout. prefix: put in front of every tensor name."""
    arrays = {prefix + name: mx.array(value).astype(dtype) for name, value in weights.items()}
    return save_checkpoint(folder, config, arrays, shards=shards)


def save_checkpoint(folder, config, arrays, shards=1):
    """config.json and model.safetensors, or `shards` numbered files with their index. Returns the Path."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    if shards == 1:
        mx.save_safetensors(str(folder / "model.safetensors"), arrays, metadata={"format": "pt"})
        return folder
    names, weight_map = sorted(arrays), {}
    for i in range(shards):
        file = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: arrays[name] for name in names[i::shards]}
        mx.save_safetensors(str(folder / file), part, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {"total_size": sum(a.nbytes for a in arrays.values())}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def _byte_symbols():
    """Byte-level BPE's symbol of every byte -> byte value: printable ones stand for themselves."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


def _changed(base, changes):
    """A deep copy of base with keys replaced; a key whose new value is None is removed."""
    merged = {**json.loads(json.dumps(base)), **changes}
    return {key: value for key, value in merged.items() if value is not None}
