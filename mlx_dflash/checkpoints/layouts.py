"""The layouts of config.json in which DFlash drafts are published, and their translation into z-lab's.

Knows the keys of speculators, vLLM, ModelOpt and SpecForge exports, and the relatives of DFlash that need another
network, which are refused by name. Knows no tensors; what a key must hold is checked by DraftConfig.
"""

from typing import Any

from ..draft.config import MAX_LAYERS, SLIDING, VERSION_2_KEYS, named_version
from ..files.json_text import told

# Keys of relatives of DFlash: key -> what it says.
_FOREIGN_KEYS = {
    "markov_rank": "a Markov head on top of DFlash (a DSpark or DFlash hybrid), whose drafts depend on one another",
    "confidence_head": "DSpark, which has a confidence head and samples its anchor",
    "shift_label": "Domino, which is trained on shifted labels",
    "pure_draft_prefix_len": "Domino, which has a recurrent prefix network",
    "layer_fusion_weights": "DFly, which mixes the tap layers anew for every draft layer",
}
_FOREIGN_NAMES = {
    "dspark": "DSpark, which has Markov and confidence heads and samples its anchor",
    "domino": "Domino, which has a recurrent prefix network",
    "dfly": "DFly, which mixes the tap layers anew for every draft layer",
    "laguna": "Laguna, which has fused projections, gates and one norm for each tap layer",
    "markov": "a Markov head on top of DFlash, whose drafts depend on one another",
}
_AUX_KEYS = ("aux_hidden_state_layer_ids", "eagle_aux_hidden_state_layer_ids")
_SPECULATORS_TOP = (
    "draft_vocab_size",
    "target_hidden_size",
    "block_size",
    "mask_token_id",
    "sample_from_anchor",
    "num_target_layers",
    "input_embedding_scale",
    "output_multiplier",
    "final_logit_softcapping",
    *VERSION_2_KEYS,
)


def zlab_layout(config: dict[str, Any]) -> dict[str, Any]:
    """Return a draft's config.json in z-lab's layout: its own keys, tap layers as numbers of target layers.

    Idempotent. Raises ValueError for the relatives of DFlash, by their name, and for malformed objects.
    """
    for key in ("dflash_config", "transformer_layer_config"):
        if not isinstance(config.get(key) or {}, dict):
            raise ValueError(f"{key} must be an object, got {type(config[key]).__name__}")
    _refuse_relatives(config)
    if config.get("speculators_model_type"):
        config = _from_speculators(config)
    config = {**config, "dflash_config": dict(config.get("dflash_config") or {})}
    _number_taps(config)
    _name_windows(config)
    return config


def tap_numbering(config: dict[str, Any]) -> str:
    """Say in words where the numbers of the tap layers come from."""
    nested = config.get("dflash_config") or {}
    if nested.get("target_layer_ids") or config.get("target_layer_ids"):
        return "target_layer_ids, as they stand"
    found = [key for key in _AUX_KEYS if nested.get(key) or config.get(key)]
    return f"{found[0]}, less one each" if found else "nowhere"


def _refuse_relatives(config: dict[str, Any]) -> None:
    nested = config.get("dflash_config") or {}
    names = [*_strings(config.get("architectures")), config.get("model_type"), config.get("speculators_model_type")]
    names += [nested.get("projector_type"), config.get("projector_type")]
    for name in names:
        for word, what in _FOREIGN_NAMES.items():
            if word in str(name).lower():
                raise ValueError(
                    f"the draft's config.json says {told(name)}: {what}; it is not plain DFlash and is not supported"
                )
    for key, what in _FOREIGN_KEYS.items():
        if nested.get(key) or config.get(key):
            raise ValueError(f"the draft's config.json has {key}: {what}; it is not plain DFlash and is not supported")
    projector = nested.get("projector_type") or config.get("projector_type")
    if projector not in (None, "dflash"):
        raise ValueError(f"projector_type {told(projector)} is not plain DFlash; its draft needs another network")
    named_version(config)


def _strings(value: Any) -> list[str]:
    return [str(v) for v in value] if isinstance(value, list) else []


def _from_speculators(config: dict[str, Any]) -> dict[str, Any]:
    """speculators' layout: the backbone in transformer_layer_config, the rest next to it."""
    kind = config["speculators_model_type"]
    if kind not in ("dflash", "dflash2"):
        raise ValueError(f"speculators_model_type {told(kind)} is not supported; expected 'dflash' or 'dflash2'")
    backbone = config.get("transformer_layer_config")
    if not backbone:
        raise ValueError(
            "the speculators config.json lacks 'transformer_layer_config', the shape of the draft's layers"
        )
    plain = {k: v for k, v in backbone.items() if k not in ("architectures", "auto_map", "dtype", "torch_dtype")}
    plain |= {key: config[key] for key in _SPECULATORS_TOP if config.get(key) is not None}
    plain |= {
        key: config[key]
        for key in ("dtype", "torch_dtype", "quantization", "quantization_config", *_AUX_KEYS)
        if key in config
    }
    plain["architectures"] = ["DFlashDraftModel" if kind == "dflash" else "DFlash2DraftModel"]
    plain["dflash_config"] = dict(config.get("dflash_config") or {})
    # Its exports bring an embedding and a head of their own, which may be reduced.
    plain |= {"has_embed_tokens": config.get("has_embed_tokens", True), "has_lm_head": config.get("has_lm_head", True)}
    if config.get("sliding_window_non_causal"):
        plain["is_causal"] = False
    return plain


def _number_taps(config: dict[str, Any]) -> None:
    """Give target_layer_ids. The aux ids of vLLM and speculators count the embedding as 0, so they are one higher."""
    nested = config["dflash_config"]
    aux = next((d.pop(key) for key in _AUX_KEYS for d in (nested, config) if d.get(key)), None)
    if nested.get("target_layer_ids") or config.get("target_layer_ids") or aux is None:
        return
    if not isinstance(aux, list) or not all(isinstance(i, int) and i >= 1 for i in aux):
        raise ValueError(
            f"aux hidden state layer ids must be numbers from 1 on, where layer l is l + 1; got {told(aux)}. If they "
            "are layer numbers already, name them target_layer_ids in dflash_config"
        )
    nested["target_layer_ids"] = [i - 1 for i in aux]


def _name_windows(config: dict[str, Any]) -> None:
    """use_swa is a window on every layer that does not hide later rows of the block."""
    nested = config["dflash_config"]
    use_swa, size = (nested.pop(key, config.pop(key, None)) for key in ("use_swa", "swa_window_size"))
    if not use_swa:
        return
    window = size or config.get("sliding_window")
    if window is None:
        raise ValueError(
            "the draft's config.json sets use_swa without swa_window_size, the number of positions it reaches back"
        )
    config["sliding_window"] = window
    num_layers = config.get("num_hidden_layers")
    if isinstance(num_layers, int) and num_layers <= MAX_LAYERS:
        config["layer_types"] = [SLIDING] * num_layers
    if config.get("is_causal") is None and nested.get("causal") is None:
        config["is_causal"] = False
