"""The configuration of a DFlash draft, read from its config.json.

Knows the keys of z-lab's layout and what their absence means; knows no other layout. Whatever would change the numbers
and is not supported is refused by name; nothing is guessed.
"""

from dataclasses import dataclass
from typing import Any

from ..files.json_text import told

FULL, SLIDING = "full_attention", "sliding_attention"
ARCHITECTURES = {
    "DFlashDraftModel": 1,
    "DFlashSpeculator": 1,
    "Qwen3DFlashModel": 1,
    "DFlash2DraftModel": 2,
    "DFlash2Speculator": 2,
    "Qwen3DFlash2Model": 2,
}  # name -> version of DFlash
MAX_LAYERS, MAX_BLOCK_SIZE = 1024, 4096  # far beyond any draft; what a damaged config may ask for has no bound
_MAX_INTEGER, _MAX_NUMBER = 2**31 - 1, 1e38  # what MLX can count to, and what a float32 holds
VERSION_2_KEYS = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")


def named_version(config: dict[str, Any]) -> int:
    """Return the version of DFlash that a config's architecture names, 1 if it names none.

    Raises ValueError for an architecture that is no draft's.
    """
    named = config.get("architectures")
    name = str(named[0]) if isinstance(named, list) and named else "DFlashDraftModel"
    if name not in ARCHITECTURES:
        raise ValueError(f"the draft's architecture is {told(name)}; expected one of {', '.join(ARCHITECTURES)}")
    return ARCHITECTURES[name]


# Numbers of rope_parameters: each must be above this one.
_ROPE_NUMBERS = {
    "rope_theta": 1,
    "factor": 0,
    "original_max_position_embeddings": 0,
    "beta_fast": 0,
    "beta_slow": 0,
    "low_freq_factor": 0,
    "high_freq_factor": 0,
    "attention_factor": 0,
    "mscale": -_MAX_NUMBER,
    "mscale_all_dim": -_MAX_NUMBER,
}


class _Reader:
    """Reads keys of a config.json: the nested dflash_config wins over the top level."""

    def __init__(self, config: dict[str, Any]):
        self.top = config
        self.nested = config.get("dflash_config") or {}

    def get(self, key: str, default: Any = None) -> Any:
        value = self.nested.get(key)
        value = self.top.get(key) if value is None else value
        return default if value is None else value

    def integer(self, key: str, default: int | None = None, minimum: int = 1, maximum: int = _MAX_INTEGER) -> int:
        value = self.get(key, default)
        if value is None:
            raise ValueError(f"the draft's config.json lacks {key!r}")
        if type(value) is not int or not minimum <= value <= maximum:
            raise ValueError(
                f"the draft's config.json has {key} = {told(value)}; expected an integer >= {minimum} and <= {maximum}"
            )
        return value

    def number(self, key: str, default: float | None = None) -> float | None:
        value = self.get(key, default)
        if value is None:
            return None
        if not _is_number(value) or value <= 0:
            raise ValueError(f"the draft's config.json has {key} = {told(value)}; expected a positive number")
        return float(value)

    def flag(self, key: str, default: bool = False) -> bool:
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise ValueError(f"the draft's config.json has {key} = {told(value)}; expected true or false")
        return value


@dataclass(frozen=True)
class DraftConfig:
    """Shape and conventions of one DFlash draft.

    target_layer_ids: tap layers, in the order in which their outputs are concatenated.
    layer_types, is_causal: one entry a draft layer. sliding_window: positions, None without sliding layers.
    block_size: trained block, anchor included. Sizes in elements; rope_scaling as Hugging Face writes it.
    draft_vocab_size: rows of the head, vocab_size unless it is reduced. input_embedding_scale, output_multiplier,
    value_scale: factors on the block's embeddings, on the logits before the softcap, and on V.
    sample_from_anchor: row i of the block proposes the token behind it, instead of the token in its own slot.
    conv_*, selector_*: DFlash 2 only, None in DFlash 1.
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
    draft_vocab_size: int
    input_embedding_scale: float
    output_multiplier: float
    value_scale: float
    has_sinks: bool
    is_rope_interleaved: bool
    sample_from_anchor: bool
    has_own_embedding: bool
    has_own_head: bool
    conv_kernel_size: int | None
    conv_group_size: int | None
    selector_rank: int | None
    selector_top_k: int | None

    @property
    def num_drafts(self) -> int:
        """Number of tokens that the trained block proposes."""
        return self.block_size if self.sample_from_anchor else self.block_size - 1

    @property
    def version(self) -> int:
        """1 or 2, of DFlash."""
        return 1 if self.selector_rank is None else 2

    @classmethod
    def from_dict(cls, config: dict[str, Any]) -> "DraftConfig":
        """Read the contents of a draft's config.json in z-lab's layout.

        Raises ValueError that names the key for anything missing, malformed or not supported.
        """
        reader = _Reader(config)
        if reader.top.get("hidden_act", "silu") != "silu":
            raise ValueError(f"hidden_act {told(reader.top['hidden_act'])} is not supported; expected 'silu'")
        num_layers = reader.integer("num_hidden_layers", maximum=MAX_LAYERS)
        num_heads = reader.integer("num_attention_heads")
        hidden_size = reader.integer("hidden_size")
        vocab_size = reader.integer("vocab_size")
        max_positions = reader.integer("max_position_embeddings", 32768)
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
            vocab_size=vocab_size,
            max_position_embeddings=max_positions,
            block_size=reader.integer("block_size", 16, 2, min(MAX_BLOCK_SIZE, max_positions)),
            mask_token_id=reader.integer("mask_token_id", minimum=0),
            target_layer_ids=_target_layer_ids(reader),
            num_target_layers=None if reader.get("num_target_layers") is None else reader.integer("num_target_layers"),
            layer_types=layer_types,
            sliding_window=reader.integer("sliding_window") if SLIDING in layer_types else None,
            is_causal=_causality(reader, layer_types),
            rope_theta=rope_theta,
            rope_scaling=rope_scaling,
            attention_bias=reader.flag("attention_bias"),
            final_logit_softcapping=reader.number("final_logit_softcapping")
            if reader.get("final_logit_softcapping")
            else None,
            quantization=_quantization(reader),
            draft_vocab_size=reader.integer("draft_vocab_size", vocab_size),
            input_embedding_scale=reader.number("input_embedding_scale", 1.0),
            output_multiplier=reader.number("output_multiplier", 1.0) * reader.number("logit_scale", 1.0),
            value_scale=reader.number("attention_value_scale", 1.0),
            **_flags(reader),
            **_version_2(reader, hidden_size),
        )
        fields._check()
        return fields

    def _check(self) -> None:
        if self.mask_token_id >= self.vocab_size:
            raise ValueError(
                f"mask_token_id {self.mask_token_id} is outside the vocabulary of {self.vocab_size} tokens"
            )
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_attention_heads {self.num_heads} is not a multiple of num_key_value_heads {self.num_kv_heads}"
            )
        if self.num_target_layers is not None and max(self.target_layer_ids) >= self.num_target_layers:
            raise ValueError(
                f"target_layer_ids {list(self.target_layer_ids)} reach beyond the {self.num_target_layers} layers "
                "that num_target_layers gives the target"
            )
        if self.draft_vocab_size > self.vocab_size:
            raise ValueError(f"draft_vocab_size {self.draft_vocab_size} is larger than vocab_size {self.vocab_size}")
        if self.version == 2 and self.sample_from_anchor:
            raise ValueError("sample_from_anchor does not go with DFlash 2, whose selector starts from the anchor")
        if self.selector_top_k is not None and self.selector_top_k > self.draft_vocab_size:
            raise ValueError(
                f"selector_top_k {self.selector_top_k} exceeds the {self.draft_vocab_size} rows of the head"
            )


def _flags(reader: _Reader) -> dict[str, bool]:
    return {
        "has_sinks": reader.flag("attention_sink_bias"),
        "is_rope_interleaved": not (reader.flag("is_neox_style", True) and reader.flag("rope_is_neox_style", True)),
        "sample_from_anchor": reader.flag("sample_from_anchor"),
        "has_own_embedding": reader.flag("has_embed_tokens"),
        "has_own_head": reader.flag("has_lm_head"),
    }


def _version_2(reader: _Reader, hidden_size: int) -> dict[str, int | None]:
    """The sizes of DFlash 2: all four, or none."""
    if named_version(reader.top) == 1 and not any(reader.get(key) for key in VERSION_2_KEYS):
        return dict.fromkeys(VERSION_2_KEYS)
    sizes = {key: reader.integer(key) for key in VERSION_2_KEYS}
    if hidden_size % sizes["conv_group_size"]:
        raise ValueError(f"conv_group_size {sizes['conv_group_size']} does not divide hidden_size {hidden_size}")
    return sizes


def _target_layer_ids(reader: _Reader) -> tuple[int, ...]:
    ids = reader.get("target_layer_ids")
    if not ids:
        raise ValueError(
            "the draft's config.json lacks 'target_layer_ids': which target layers it was trained on is not guessed"
        )
    if not isinstance(ids, list) or not all(type(i) is int and i >= 0 for i in ids):
        raise ValueError(f"target_layer_ids must be layer numbers from 0 on, got {told(ids)}")
    return tuple(ids)


def _layer_types(reader: _Reader, num_layers: int) -> tuple[str, ...]:
    types = reader.get("layer_types") or [FULL] * num_layers
    if not isinstance(types, list) or len(types) != num_layers or not all(t in (FULL, SLIDING) for t in types):
        raise ValueError(f"layer_types must hold {num_layers} of {FULL!r} and {SLIDING!r}, got {told(types)}")
    return tuple(types)


def _causality(reader: _Reader, layer_types: tuple[str, ...]) -> tuple[bool, ...]:
    """In-block causality of each layer: is_causal, else the older spellings, else sliding layers only."""
    for value in (reader.top.get("is_causal"), reader.nested.get("causal"), reader.top.get("dflash_query_causal")):
        if value is not None:
            return (bool(value),) * len(layer_types)
    return tuple(kind == SLIDING for kind in layer_types)


def _rope(reader: _Reader) -> tuple[float, dict | None]:
    """The rope base and scaling, from either spelling; rope_parameters replaces both older keys."""
    parameters = reader.get("rope_parameters") or reader.get("rope_scaling") or {}
    if not isinstance(parameters, dict):
        raise ValueError(f"rope_parameters and rope_scaling must be objects, got {told(parameters)}")
    scaling = dict(parameters)
    theta = scaling.pop("rope_theta", None) or reader.get("rope_theta", 10000.0)
    for key, value in {"rope_theta": theta, **scaling}.items():
        least = _ROPE_NUMBERS.get(key)
        if value is not None and least is not None and not (_is_number(value) and value > least):
            raise ValueError(f"the draft's config.json has {key} = {told(value)}; expected a number above {least:g}")
        if least is not None and key in scaling and type(value) is int and value > _MAX_INTEGER:
            scaling[key] = float(value)  # MLX takes no larger integers
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind in ("default", "mrope"):
        # Text has the same position in all sections of a multimodal rope. A partial_rotary_factor here is the target's,
        # copied by the exporter: drafts without scaling rotate all channels.
        return float(theta), None
    if kind not in ("linear", "llama3", "yarn"):
        raise ValueError(f"rope type {told(kind)} is not supported; expected default, linear, llama3 or yarn")
    partial = scaling.get("partial_rotary_factor", 1.0)
    if partial != 1.0:
        raise ValueError(f"partial_rotary_factor {told(partial)} is not supported; expected 1.0, all channels rotated")
    if kind != "linear":
        scaling.setdefault("original_max_position_embeddings", reader.integer("max_position_embeddings"))
    if scaling.get("factor") is None:
        raise ValueError(f"rope type {told(kind)} needs a positive 'factor', got none")
    scaling["rope_type"] = kind
    scaling.pop("type", None)
    return float(theta), scaling


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and -_MAX_NUMBER < value < _MAX_NUMBER


def _quantization(reader: _Reader) -> dict | None:
    """MLX's own quantization settings; other tools' are refused by name."""
    own = reader.top.get("quantization")
    other = reader.top.get("quantization_config")
    if own is None and isinstance(other, dict) and "group_size" not in other:
        method = other.get("quant_method") or other.get("quant_algo") or "unknown"
        raise ValueError(f"weights quantized by {told(method)} are not supported; convert an unquantized draft")
    found = own if own is not None else other
    if found is not None and not (isinstance(found, dict) and {"group_size", "bits"} <= found.keys()):
        raise ValueError(f"quantization must be an object with group_size and bits, got {told(found)}")
    return found
