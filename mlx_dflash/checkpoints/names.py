"""The names of a draft's tensors: one table from every spelling in the wild to z-lab's, which DraftModel has.

Knows names only. A name that belongs to a relative of DFlash, or to weights packed by another tool, is refused with
the reason; a name that means nothing here is left for the loader to complain about.
"""

import re
from collections.abc import Iterable

from .gguf_keys import LAYER_MODULES

# Prefixes of exports, taken off the front.
_PREFIXES = ("model.", "draft_model.", "dflash.")

# (pattern of the whole name, z-lab's name), applied one after the other.
_ALIASES = [
    (r"midlayer\.(.+)", r"layers.0.\1"),
    (r"(?:encoder\.fc|context_proj|enc\.fc)\.(\w+)", r"fc.\1"),
    (r"(?:encoder\.output_norm_enc|context_norm|enc\.output_norm)\.weight", "hidden_norm.weight"),
    (r"(?:final_norm|output_norm)\.weight", "norm.weight"),
    (r"encoder\.layers\.(.+)", r"layers.\1"),
    (r"(?:logit_head|output)\.(\w+)", r"lm_head.\1"),
    (r"token_embd\.(\w+)", r"embed_tokens.\1"),
    (r"(layers\.\d+\.self_attn)\.sinks", r"\1.attention_sink_bias"),
    (r"candidate_selector\.(predecessor|successor)_codebook\.weight", r"candidate_selector.\1_codebook"),
    (r"mask_embedding\.weight", "mask_embedding"),
    # GGUF.
    (r"blk\.(\d+)\.attn_sinks(?:\.weight)?", r"layers.\1.self_attn.attention_sink_bias"),
    (r"blk\.(\d+)\.attn_conv_base(?:\.weight)?", r"layers.\1.attention_conv.base_kernel"),
    (r"blk\.(\d+)\.ffn_conv_base(?:\.weight)?", r"layers.\1.mlp_conv.base_kernel"),
    (r"blk\.(\d+)\.attn_conv_proj\.(\w+)", r"layers.\1.attention_conv.kernel_projection.\2"),
    (r"blk\.(\d+)\.ffn_conv_proj\.(\w+)", r"layers.\1.mlp_conv.kernel_projection.\2"),
    (r"selector_(predecessor|successor)(?:\.weight)?", r"candidate_selector.\1_codebook"),
    (r"selector_hidden\.(\w+)", r"candidate_selector.hidden_projection.\1"),
    (r"d2t\.weight", "d2t"),
]
# Copies of what follows from the configuration, or of the target's own.
_DERIVED = re.compile(r"(.*\.)?rotary_emb\..*|t2d|verifier_(lm_head|norm)\..*|rope_freqs\.weight")

_FOREIGN = [
    (
        r"(.*\.)?markov_w[12]\b.*|joint_proj\b.*|(confidence|conf)_proj\b.*|gate_proj\b.*",
        "DSpark: Markov and confidence heads",
    ),
    (r"(.*\.)?markov.*", "a Markov head on top of DFlash"),
    (r"prefix_gru\..*|embed_proj\..*", "Domino: a recurrent prefix network"),
    (r"(.*\.)?layer_fusion_weights|(.*\.)?hidden_correction\..*", "DFly: layer fusion"),
    (
        r"(.*\.)?aux_hidden_norms\..*|enc\.aux_norm\b.*|(.*\.)?(qkv_proj|g_proj)\..*",
        "Laguna: fused projections, gates, a norm for each tap",
    ),
    (
        r".*\.(weight_packed|weight_scale|weight_scale_2|weight_scale_inv|weight_global_scale|input_scale|qweight|qzeros|absmax)",
        "weights packed by another tool; convert an unquantized draft",
    ),
]


def plain_name(name: str) -> str | None:
    """Return z-lab's name of a tensor, the name itself if no rule knows it, None for what carries nothing.

    Raises ValueError for a tensor of a relative of DFlash, with the relative's name.
    """
    for prefix in _PREFIXES:
        name = name.removeprefix(prefix)
    for pattern, what in _FOREIGN:
        if re.fullmatch(pattern, name):
            raise ValueError(f"the draft has a tensor {name}: {what}; this is not plain DFlash and is not supported")
    if _DERIVED.fullmatch(name):
        return None
    for pattern, new in _ALIASES:
        if match := re.fullmatch(pattern, name):
            name = match.expand(new)
    if match := re.fullmatch(r"blk\.(\d+)\.(\w+)\.(\w+)", name):
        name = f"layers.{match[1]}.{LAYER_MODULES.get(match[2], match[2])}.{match[3]}"
    return name


def plain_names(names: Iterable[str]) -> dict[str, str]:
    """Return name in the file -> z-lab's name. Raises ValueError if two tensors would get one name."""
    found: dict[str, str] = {}
    for name in names:
        plain = plain_name(name)
        if plain is None:
            continue
        if plain in found.values():
            raise ValueError(f"the draft holds {plain} twice, the second time as {name}")
        found[name] = plain
    return found
