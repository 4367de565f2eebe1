"""The configuration of a DFlash draft, read from its config.json.

Knows the keys that z-lab's DFlash 1 checkpoints use and what their absence means. Whatever would change the
numbers and is not supported is refused by name; nothing is guessed.
"""

from dataclasses import dataclass
from typing import Any

FULL, SLIDING = "full_attention", "sliding_attention"

# Keys of relatives of DFlash that need other networks: key -> what it says.
_FOREIGN = {
    "markov_rank": "a Markov head (DSpark or a DFlash hybrid)",
    "confidence_head": "a confidence head (DSpark)",
    "shift_label": "shifted labels (Domino)",
    "pure_draft_prefix_len": "a recurrent prefix (Domino)",
    "layer_fusion_weights": "layer fusion (DFly)",
}
# Keys of DFlash checkpoints that are not supported: key -> the values that change nothing.
_UNSUPPORTED: dict[str, tuple] = {
    "conv_kernel_size": (None,),
    "conv_group_size": (None,),
    "selector_rank": (None,),
    "selector_top_k": (None,),
    "use_swa": (None, False),
    "attention_sink_bias": (None, False),
    "attention_value_scale": (None, 1, 1.0),
    "input_embedding_scale": (None, 1, 1.0),
    "output_multiplier": (None, 1, 1.0),
    "logit_scale": (None, 1, 1.0),
    "sample_from_anchor": (None, False),
    "is_neox_style": (None, True),
    "rope_is_neox_style": (None, True),
    "eagle_aux_hidden_state_layer_ids": (None,),
    "aux_hidden_state_layer_ids": (None,),
    "has_embed_tokens": (None, False),
}


class _Reader:
    """Reads keys of a config.json: the nested dflash_config wins over the top level."""

    def __init__(self, config: dict[str, Any]):
        self.top = config
        self.nested = config.get("dflash_config") or {}
        if not isinstance(self.nested, dict):
            raise ValueError(f"dflash_config must be an object, got {type(self.nested).__name__}")

    def get(self, key: str, default: Any = None) -> Any:
        value = self.nested.get(key)
        value = self.top.get(key) if value is None else value
        return default if value is None else value

    def integer(self, key: str, default: int | None = None, minimum: int = 1) -> int:
        value = self.get(key, default)
        if value is None:
            raise ValueError(f"the draft's config.json lacks {key!r}")
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise ValueError(f"the draft's config.json has {key} = {value!r}; expected an integer >= {minimum}")
        return value

    def number(self, key: str, default: float | None = None) -> float | None:
        value = self.get(key, default)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < float("inf"):
            raise ValueError(f"the draft's config.json has {key} = {value!r}; expected a positive number")
        return float(value)


@dataclass(frozen=True)
class DraftConfig:
    """Shape and conventions of one DFlash draft.

    target_layer_ids: tap layers, in the order in which their outputs are concatenated.
    layer_types, is_causal: one entry a draft layer. sliding_window: positions, None without sliding layers.
    block_size: trained block, anchor included. Sizes in elements; rope_scaling as Hugging Face writes it.
    """

    hidden_size: int
    target_hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    vocab_size: int
    max_position_embeddings: int
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: int | None
    layer_types: tuple[str, ...]
    sliding_window: int | None
    is_causal: tuple[bool, ...]
    rope_theta: float
    rope_scaling: dict | None
    attention_bias: bool
    final_logit_softcapping: float | None
    quantization: dict | None

    @classmethod
    def from_dict(cls, config: dict[str, Any]) -> "DraftConfig":
        """Read the contents of a z-lab DFlash 1 config.json.

        Raises ValueError that names the key for anything missing, malformed or not supported.
        """
        reader = _Reader(config)
        _refuse_foreign(reader)
        num_layers = reader.integer("num_hidden_layers")
        num_heads = reader.integer("num_attention_heads")
        hidden_size = reader.integer("hidden_size")
        layer_types = _layer_types(reader, num_layers)
        rope_theta, rope_scaling = _rope(reader)
        fields = cls(
            hidden_size=hidden_size,
            target_hidden_size=reader.integer("target_hidden_size", hidden_size),
            intermediate_size=reader.integer("intermediate_size"),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=reader.integer("num_key_value_heads", num_heads),
            head_dim=reader.integer("head_dim", hidden_size // num_heads),
            rms_norm_eps=reader.number("rms_norm_eps", 1e-6),
            vocab_size=reader.integer("vocab_size"),
            max_position_embeddings=reader.integer("max_position_embeddings", 32768),
            block_size=reader.integer("block_size", 16, minimum=2),
            mask_token_id=reader.integer("mask_token_id", minimum=0),
            target_layer_ids=_target_layer_ids(reader),
            num_target_layers=reader.get("num_target_layers"),
            layer_types=layer_types,
            sliding_window=reader.integer("sliding_window") if SLIDING in layer_types else None,
            is_causal=_causality(reader, layer_types),
            rope_theta=rope_theta,
            rope_scaling=rope_scaling,
            attention_bias=bool(reader.get("attention_bias", False)),
            final_logit_softcapping=reader.number("final_logit_softcapping"),
            quantization=_quantization(reader),
        )
        fields._check()
        return fields

    def _check(self) -> None:
        if self.mask_token_id >= self.vocab_size:
            raise ValueError(f"mask_token_id {self.mask_token_id} is outside the vocabulary of {self.vocab_size} tokens")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_attention_heads {self.num_heads} is not a multiple of num_key_value_heads {self.num_kv_heads}")
        if self.num_target_layers is not None and max(self.target_layer_ids) >= self.num_target_layers:
            raise ValueError(
                f"target_layer_ids {list(self.target_layer_ids)} reach beyond the {self.num_target_layers} layers "
                "that num_target_layers gives the target"
            )


def _refuse_foreign(reader: _Reader) -> None:
    projector = reader.get("projector_type")
    if projector not in (None, "dflash"):
        raise ValueError(f"projector_type {projector!r} is not plain DFlash; its draft needs another network")
    for key, what in _FOREIGN.items():
        if reader.get(key):
            raise ValueError(f"the draft's config.json has {key}: {what}, which is not plain DFlash")
    if reader.top.get("speculators_model_type"):
        raise ValueError("drafts in the speculators format are not supported; expected z-lab's DFlash layout")
    architectures = reader.top.get("architectures") or ["DFlashDraftModel"]
    if architectures[0] != "DFlashDraftModel":
        raise ValueError(f"the draft's architecture is {architectures[0]!r}; expected 'DFlashDraftModel'")
    if reader.top.get("model_type") == "laguna":
        raise ValueError("model_type 'laguna' has fused projections and gates; it is not plain DFlash")
    if reader.top.get("hidden_act", "silu") != "silu":
        raise ValueError(f"hidden_act {reader.top['hidden_act']!r} is not supported; expected 'silu'")
    for key, neutral in _UNSUPPORTED.items():
        if reader.get(key) not in neutral:
            raise ValueError(f"the draft's config.json sets {key} = {reader.get(key)!r}, which is not supported")
    vocab, draft_vocab = reader.get("vocab_size"), reader.get("draft_vocab_size")
    if draft_vocab not in (None, vocab):
        raise ValueError(f"draft_vocab_size {draft_vocab} differs from vocab_size {vocab}: reduced heads are not supported")


def _target_layer_ids(reader: _Reader) -> tuple[int, ...]:
    ids = reader.get("target_layer_ids")
    if not ids:
        raise ValueError("the draft's config.json lacks 'target_layer_ids': which target layers it was trained on is not guessed")
    if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
        raise ValueError(f"target_layer_ids must be layer numbers from 0 on, got {ids}")
    return tuple(ids)


def _layer_types(reader: _Reader, num_layers: int) -> tuple[str, ...]:
    types = reader.get("layer_types") or [FULL] * num_layers
    if len(types) != num_layers or set(types) - {FULL, SLIDING}:
        raise ValueError(f"layer_types must hold {num_layers} of {FULL!r} and {SLIDING!r}, got {types}")
    return tuple(types)


def _causality(reader: _Reader, layer_types: tuple[str, ...]) -> tuple[bool, ...]:
    """In-block causality of each layer: is_causal, else the older spellings, else sliding layers only."""
    for value in (reader.top.get("is_causal"), reader.nested.get("causal"), reader.top.get("dflash_query_causal")):
        if value is not None:
            return (bool(value),) * len(layer_types)
    return tuple(kind == SLIDING for kind in layer_types)


def _rope(reader: _Reader) -> tuple[float, dict | None]:
    """The rope base and scaling, from either spelling; a base inside the scaling wins."""
    parameters, older = reader.get("rope_parameters"), reader.get("rope_scaling")
    if parameters and older and parameters != older:
        raise ValueError(f"rope_parameters {parameters} and rope_scaling {older} contradict each other")
    scaling = dict(parameters or older or {})
    theta = scaling.pop("rope_theta", None) or reader.get("rope_theta", 10000.0)
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind == "default":
        return float(theta), None
    if kind not in ("linear", "llama3", "yarn"):
        raise ValueError(f"rope type {kind!r} is not supported; expected default, linear, llama3 or yarn")
    partial = scaling.get("partial_rotary_factor", 1.0)
    if partial != 1.0:
        raise ValueError(f"partial_rotary_factor {partial} is not supported; expected 1.0")
    if scaling.get("attention_factor") is not None:
        raise ValueError("rope scaling with an explicit attention_factor is not supported")
    if scaling.get("truncate") is False:
        raise ValueError("rope scaling with truncate = false is not supported")
    if not (scaling.get("mscale") and scaling.get("mscale_all_dim")):
        # Alone, neither of the two counts for Hugging Face; mlx-lm would apply the first.
        scaling.pop("mscale", None)
        scaling.pop("mscale_all_dim", None)
    if kind != "linear":
        scaling.setdefault("original_max_position_embeddings", reader.integer("max_position_embeddings"))
    scaling["rope_type"] = kind
    scaling.pop("type", None)
    return float(theta), scaling


def _quantization(reader: _Reader) -> dict | None:
    """MLX's own quantization settings; other tools' are refused by name."""
    own = reader.top.get("quantization")
    other = reader.top.get("quantization_config")
    if own is None and other is not None and "group_size" not in other:
        method = other.get("quant_method") or other.get("quant_algo") or "unknown"
        raise ValueError(f"weights quantized by {method!r} are not supported; convert an unquantized draft")
    return own if own is not None else other
