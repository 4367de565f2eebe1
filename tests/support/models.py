"""A tiny model of every type that mlx-lm knows, and how each takes back refused tokens.

The configurations hold sizes that one table shares, and for each type what it needs besides. Windows are 8 tokens, so
that short texts wrap them; the vocabulary is 10 tokens, so that drafts are kept and refused in turn.
"""

import importlib
import json

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten

from mlx_dflash.caches import rollback

# Types that mlx-lm itself cannot run here.
NOT_ON_CPU = {
    "bitnet": "its linear layers are a Metal kernel",
    "muse_spark": "its attention is a Metal kernel",
    "olmo": "needs the package ai2-olmo",
}
# Types whose passes over several tokens are not what one-token passes give, in mlx-lm itself: refused.
REFUSED = {"phi3small": "adds its boolean mask to the attention scores"}
# Types that keep a state which can be run again from its recorded inputs, and those whose kept tokens run again.
RECURRENCE = (
    "bailing_moe_v3",
    "falcon_h1",
    "gear",
    "granitemoehybrid",
    "kimi_k3",
    "kimi_linear",
    "lfm2",
    "lfm2-vl",
    "lfm2_moe",
    "mamba2",
    "nemotron_h",
    "olmo_hybrid",
    "plamo2",
    "prism_hadamard_qwen35",
    "qwen3_5",
    "qwen3_5_moe",
    "qwen3_next",
)
REPLAY = (
    "baichuan_m1",
    "bailing_hybrid",
    "bailing_moe_linear",
    "deepseek_v41",
    "jamba",
    "longcat_flash_ngram",
    "mamba",
    "recurrent_gemma",
    "rwkv7",
)

_COMMON = dict(
    vocab_size=10,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=256,
    rope_theta=1000.0,
    partial_rotary_factor=0.5,
    rms_norm_eps=1e-5,
    layer_norm_eps=1e-5,
    layer_norm_epsilon=1e-5,
    norm_eps=1e-5,
    layernorm_epsilon=1e-5,
    tie_word_embeddings=False,
    attention_bias=False,
    mlp_bias=False,
    use_bias=False,
    use_qk_norm=True,
    rope_scaling=None,
    sliding_window=8,
    # Mixtures of experts.
    num_experts=4,
    n_routed_experts=4,
    num_local_experts=4,
    moe_num_experts=4,
    num_experts_per_tok=2,
    moe_topk=2,
    moe_k=2,
    moe_top_k=2,
    num_experts_per_token=2,
    moe_intermediate_size=16,
    shared_expert_intermediate_size=16,
    shared_intermediate_size=16,
    moe_shared_expert_intermediate_size=16,
    n_shared_experts=1,
    num_shared_experts=1,
    num_shared_expert=1,
    norm_topk_prob=True,
    routed_scaling_factor=1.0,
    first_k_dense_replace=1,
    n_group=1,
    topk_group=1,
    mlp_only_layers=[],
    decoder_sparse_step=1,
    moe_layer_freq=1,
    topk_method="noaux_tc",
    scoring_func="sigmoid",
    # Latent attention, and attention to the best rows of an index.
    kv_lora_rank=16,
    q_lora_rank=16,
    qk_rope_head_dim=8,
    qk_nope_head_dim=8,
    v_head_dim=8,
    index_head_dim=16,
    index_n_heads=2,
    index_topk=6,
    # Recurrences.
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=8,
    linear_value_head_dim=8,
    linear_conv_kernel_dim=4,
    linear_allow_neg_eigval=True,
    conv_kernel=4,
    use_conv_bias=True,
    state_size=8,
    ssm_state_size=8,
    time_step_rank=4,
    n_groups=2,
    time_step_limit=[0.001, 100.0],
    mamba_d_conv=4,
    mamba_d_state=8,
    mamba_expand=2,
    mamba_n_heads=4,
    mamba_d_head=8,
    mamba_n_groups=2,
    mamba_num_heads=4,
    mamba_head_dim=8,
    mamba_proj_bias=False,
    mamba_conv_bias=True,
    layer_group_size=2,
    group_norm_size=2,
    # Granite's and MiniCPM's factors.
    logits_scaling=0.5,
    attention_multiplier=0.3,
    embedding_multiplier=2.0,
    residual_multiplier=0.7,
    dim_model_base=16,
    scale_depth=1.4,
    scale_emb=2,
    # GPT-2's names.
    n_embd=32,
    n_head=4,
    n_layer=4,
    n_positions=256,
    n_ctx=256,
    n_inner=48,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
)

_SLIDING = ["sliding_attention", "full_attention"] * 2
_LINEAR = ["linear_attention", "full_attention"] * 2
_MAMBA = ["mamba", "attention"] * 2
_CONV = ["conv", "full_attention"] * 2
_ROPE = {"rope_type": "default", "rope_theta": 1000.0}
_DELTA = {"rope_parameters": {**_ROPE, "partial_rotary_factor": 0.5}, "full_attention_interval": 2}
_KDA = {"kda_layers": [1, 3], "full_attn_layers": [2, 4], "num_heads": 4, "head_dim": 8, "short_conv_kernel_size": 4}
# A 2-bit pack, of the embedding alone.
_PACK = dict(
    schema_version=2,
    tensor_namespace="mlx-vlm-qwen3_5",
    quantization={"bits": 2, "group_size": 128, "mode": "affine"},
    modules=[{"path": "model.embed_tokens", "embedding": True, "dtype": "float16", "block": 0}],
)
# Types that hold the config of a text model, and whose.
_EMBEDDED = {
    "gemma3": "gemma3_text",
    "gemma4": "gemma4_text",
    "kimi_k25": "deepseek_v3",
    "kimi_vl": "deepseek_v3",
    "lfm2-vl": "lfm2",
    "mistral3": "ministral3",
    "pixtral": "llama",
    "qwen2_vl": "qwen2",
    "qwen3_5": "qwen3_5",
    "qwen3_5_moe": "qwen3_5",
    "qwen3_vl": "qwen3",
    "qwen3_vl_moe": "qwen3_moe",
    "prism_hadamard_qwen35": "qwen3_5",
    "gemma3n": "gemma3n",
    "kimi_k3": "kimi_k3",
    "llama4": "llama4",
    "minimax_m3_vl": "minimax_m3_vl",
    "muse_spark": "muse_spark",
}

# What each type needs besides the common sizes.
_OWN = {
    "Klear": {},
    "afm7": dict(hidden_dim=32, num_kv_reuse_layers=2),
    "afmoe": dict(layer_types=_SLIDING, num_dense_layers=1),
    "apertus": dict(post_norm=False, qk_norm=True),
    "baichuan_m1": dict(sliding_window_layers=[0, 2], conv_window=2),
    "bailing_hybrid": {},
    "bailing_moe": {},
    "bailing_moe_linear": {},
    "bailing_moe_v3": {},
    "bitnet": {},
    "cohere": {},
    "cohere2": dict(sliding_window_pattern=2),
    "dbrx": dict(
        d_model=32,
        n_layers=4,
        n_heads=4,
        attn_config={"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 1000.0},
        ffn_config={"ffn_hidden_size": 16, "moe_num_experts": 4, "moe_top_k": 2},
    ),
    "deepseek": {},
    "deepseek_v2": dict(rope_scaling={"factor": 2, "type": "yarn", "original_max_position_embeddings": 64}),
    "deepseek_v3": {},
    "deepseek_v32": {},
    "deepseek_v41": dict(compress_ratios=[1, 4, 4, 1], o_groups=2, o_lora_rank=8, hc_mult=2, hc_sinkhorn_iters=2),
    "dots1": {},
    "ernie4_5": {},
    "ernie4_5_moe": {},
    "exaone": {},
    "exaone4": dict(sliding_window_pattern="LG"),
    "exaone_moe": dict(layer_types=_SLIDING, is_moe_layer=[False, True, True, True]),
    "falcon_h1": dict(mamba_d_ssm=32),
    "gear": dict(layer_types=["conv_mixer", "sliding_attention", "conv_mixer", "full_attention"]),
    "gemma": {},
    "gemma2": {},
    "gemma3_text": dict(sliding_window_pattern=2, query_pre_attn_scalar=8),
    "gemma3n": dict(
        num_kv_shared_layers=2,
        vocab_size_per_layer_input=10,
        rope_local_base_freq=100.0,
        final_logit_softcapping=30.0,
        layer_types=_SLIDING,
        activation_sparsity_pattern=[0.5, 0.0, 0.0, 0.0],
        hidden_size_per_layer_input=8,
        altup_num_inputs=2,
        altup_coef_clip=120.0,
        altup_correct_scale=True,
        altup_active_idx=0,
        laurel_rank=4,
        intermediate_size=[48] * 4,
    ),
    "gemma4_text": dict(
        global_head_dim=16,
        vocab_size_per_layer_input=10,
        hidden_size_per_layer_input=8,
        num_kv_shared_layers=2,
        layer_types=_SLIDING,
    ),
    "glm": {},
    "glm4": {},
    "glm4_moe": {},
    "glm4_moe_lite": {},
    "glm_moe_dsa": dict(rope_parameters=_ROPE),
    "gpt2": {},
    "gpt_bigcode": {},
    "gpt_neox": dict(rotary_emb_base=1000, rotary_pct=0.5),
    "gpt_oss": dict(layer_types=_SLIDING),
    "gptj": dict(rotary_dim=4),
    "granite": {},
    "granitemoe": {},
    "granitemoehybrid": dict(layer_types=_MAMBA),
    "helium": {},
    "hunyuan": dict(
        rope_scaling={"type": "dynamic", "alpha": 100.0, "factor": 1.0},
        use_mixed_mlp_moe=True,
        use_cla=True,
        cla_share_factor=2,
    ),
    "hunyuan_v1_dense": dict(rope_scaling={"type": "dynamic", "alpha": 100.0, "factor": 1.0}),
    "internlm2": {},
    "internlm3": {},
    "iquestloopcoder": dict(loop_window_size=8),
    "jamba": dict(attn_layer_offset=1, attn_layer_period=2, expert_layer_offset=1, expert_layer_period=2),
    "kimi_k3": dict(linear_attn_config=_KDA, attn_res_block_size=2),
    "kimi_linear": dict(linear_attn_config=_KDA, model_max_length=256),
    "laguna": dict(
        layer_types=_SLIDING,
        mlp_layer_types=["dense"] + ["sparse"] * 3,
        rope_parameters={"full_attention": _ROPE, "sliding_attention": _ROPE},
    ),
    "lfm2": dict(
        layer_types=_CONV,
        conv_bias=False,
        conv_L_cache=3,
        block_dim=32,
        block_ff_dim=48,
        block_multiple_of=8,
        block_ffn_dim_multiplier=1.0,
        block_auto_adjust_ff_dim=False,
    ),
    "lfm2_moe": dict(layer_types=_CONV, conv_bias=False, conv_L_cache=3, use_expert_bias=True, num_dense_layers=1),
    "lille-130m": dict(n_embd=96, block_size=256, n_kv_heads=2),
    "llama": {},
    "llama4": dict(
        attention_chunk_size=8,
        interleave_moe_layer_step=2,
        intermediate_size_mlp=48,
        num_experts_per_tok=1,
    ),
    "llama4_text": dict(intermediate_size_mlp=48, no_rope_layers=[1, 1, 1, 0]),
    "longcat_flash": dict(
        attention_method="MLA",
        zero_expert_type="identity",
        ffn_hidden_size=48,
        expert_ffn_hidden_size=16,
        zero_expert_num=2,
        mla_scale_q_lora=True,
        mla_scale_kv_lora=True,
    ),
    "longcat_flash_ngram": dict(
        ffn_hidden_size=48,
        expert_ffn_hidden_size=16,
        zero_expert_num=2,
        mla_scale_q_lora=True,
        mla_scale_kv_lora=True,
        ngram_vocab_size_ratio=7,
        emb_neighbor_num=3,
        emb_split_num=2,
    ),
    "mamba": {},
    "mamba2": dict(num_heads=8),
    "mellum": dict(layer_types=_SLIDING, rope_parameters={"full_attention": _ROPE, "sliding_attention": _ROPE}),
    "mimo": {},
    "mimo_v2_flash": dict(
        hybrid_layer_pattern=[1, 0, 1, 0],
        moe_layer_freq=[0, 1, 1, 1],
        add_swa_attention_sink_bias=True,
        add_full_attention_sink_bias=False,
        sliding_window_size=8,
        swa_rope_theta=100.0,
        swa_num_attention_heads=4,
        swa_num_key_value_heads=2,
        swa_head_dim=8,
        swa_v_head_dim=8,
    ),
    "minicpm": {},
    "minicpm3": dict(rope_scaling={"original_max_position_embeddings": 256, "long_factor": [1.0] * 4}),
    "minimax": dict(rotary_dim=4),
    "minimax_m3_vl": dict(
        dense_intermediate_size=48,
        rotary_dim=4,
        moe_layer_freq=[0, 1, 1, 1],
        index_block_size=4,
        index_topk_blocks=2,
        sparse_attention_freq=[0, 1, 0, 1],
    ),
    "ministral3": dict(
        layer_types=_SLIDING,
        rope_parameters={**_ROPE, "llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 16},
    ),
    "mistral4": dict(rope_parameters={**_ROPE, "llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 16}),
    "mixtral": {},
    "muse_glimmer": dict(layer_types=_SLIDING),
    "muse_spark": dict(
        post_norm_eps=1e-8,
        rope_parameters=_ROPE,
        layer_rope_theta=[100.0, 1000.0] * 2,
        layer_types=_SLIDING,
        final_logit_softcapping=20.0,
        output_multiplier=1.0,
        moe_hidden_size=16,
        num_shared_experts=0,
    ),
    "nanbeige": dict(num_loops=2),
    "nanochat": {},
    "nemotron": dict(hidden_act="relu2"),
    "nemotron-nas": dict(
        block_configs=[
            {"attention": {"n_heads_in_group": 2}, "ffn": {"ffn_mult": 1.0}},
            {"attention": {"no_op": True}, "ffn": {"ffn_mult": 1.0}},
            {"attention": {"n_heads_in_group": 2}, "ffn": {"no_op": True}},
            {"attention": {"replace_with_linear": True}, "ffn": {"replace_with_linear": True}},
        ]
    ),
    "nemotron_h": dict(hybrid_override_pattern="M*ME", num_hidden_layers=4, mamba_num_heads=4, mamba_head_dim=8),
    "olmo": dict(d_model=32, n_heads=4, n_layers=4, mlp_hidden_size=48, embedding_size=10),
    "olmo2": {},
    "olmo3": dict(layer_types=_SLIDING),
    "olmo_hybrid": dict(layer_types=_LINEAR),
    "olmoe": {},
    "openelm": dict(
        num_transformer_layers=4,
        model_dim=32,
        ffn_dim_divisor=8,
        num_query_heads=[4] * 4,
        num_kv_heads=[2] * 4,
        ffn_multipliers=[1.0, 1.5, 1.0, 2.0],
    ),
    "phi": {},
    "phi3": {},
    # It masks some ids of its tokenizer, so the vocabulary must hold them.
    "phi3small": dict(vocab_size=100352, dense_attention_every_n_layers=2, ff_intermediate_size=48, gegelu_limit=20.0),
    "phimoe": dict(
        rope_scaling={
            "type": "longrope",
            "short_factor": [1.0] * 4,
            "long_factor": [1.1] * 4,
            "long_mscale": 1.2,
            "short_mscale": 1.0,
        }
    ),
    "phixtral": dict(num_vocab=10, model_dim=32, rotary_dim=4),
    "plamo": dict(n_shared_head=2),
    "plamo2": dict(hidden_size_per_head=8, full_attention_idx=[1, 3]),
    "plamo3": dict(window_size=8, sliding_window_pattern=2),
    "qwen": dict(kv_channels=8),
    "qwen2": {},
    "qwen2_moe": {},
    "qwen3": {},
    "qwen3_5": dict(_DELTA, num_experts=0),
    "qwen3_moe": {},
    "qwen3_next": dict(full_attention_interval=2),
    "recurrent_gemma": dict(
        conv1d_width=4,
        logits_soft_cap=30.0,
        attention_window_size=8,
        block_types=["recurrent", "attention"],
    ),
    "rwkv7": dict(a_low_rank_dim=4, v_low_rank_dim=4, gate_low_rank_dim=4, decay_low_rank_dim=4),
    "seed_oss": {},
    "smollm3": {},
    "solar_open": {},
    "spark2_5": dict(layer_types=_SLIDING, rope_parameters={"full_attention": _ROPE, "sliding_attention": _ROPE}),
    "stablelm": dict(use_qkv_bias=False),
    "starcoder2": {},
    "step3p5": dict(num_attention_groups=2, layer_types=_SLIDING, share_expert_dim=16, moe_layers_enum="1,2,3"),
    "talkie": {},
    "telechat3": {},
    "youtu_llm": {},
}


def config(model_type, **changes):
    """The config of a tiny model of this type, a fresh dict. changes: of the common sizes and the type's own."""
    inner = _EMBEDDED.get(model_type)
    own = {**_COMMON, **_OWN[inner or model_type], **changes}
    if model_type == "qwen3_5_moe":
        own["num_experts"] = 4
    if model_type == "prism_hadamard_qwen35":
        own |= dict(hidden_size=128, num_experts=0)
    if inner is not None:
        own = {"text_config": {**own, "model_type": inner}, "vocab_size": own["vocab_size"], **_PACK}
    return json.loads(json.dumps({**own, "model_type": model_type}))


def build(model_type, seed=0, **changes):
    """A model of this type with seeded float32 weights, evaluated, in eval mode. Seeds mx.random, too."""
    mx.random.seed(seed)  # some biases stay near random values that mlx gave them
    args = config(model_type, **changes)
    module = importlib.import_module(f"mlx_lm.models.{model_type}")
    model = module.Model(module.ModelArgs.from_dict(args))
    rng = np.random.RandomState(seed)
    weights = []
    for name, value in sorted(tree_flatten(model.parameters())):
        noise = rng.standard_normal(value.shape)
        if value.dtype == mx.uint32:
            array = rng.randint(0, 2**32, value.shape, dtype=np.uint32)
        elif name.endswith("A_log"):
            array = np.log(1 + np.abs(noise))
        elif value.ndim > 1:
            array = 0.3 * noise
        else:  # Norms stay near what they start as, one or zero.
            array = float(value.reshape(-1)[0]) + 0.1 * noise
        weights.append((name, mx.array(array).astype(value.dtype if value.dtype == mx.uint32 else mx.float32)))
    model.update(tree_unflatten(weights))
    model.eval()
    mx.eval(model.parameters())
    return model


def way(model_type):
    """How a target of this type takes back refused tokens: "rows", "recurrence" or "replay"."""
    return "recurrence" if model_type in RECURRENCE else "replay" if model_type in REPLAY else "rows"


def way_back(target):
    """How refused tokens in fact left the caches of a Target that has rewound, in the words of `way`."""
    if not rollback.Checkpoint(target.caches, 0).recurrent:
        return "rows"
    return "recurrence" if target._recurrences.works else "replay"


MODEL_TYPES = tuple(sorted({*_OWN, *_EMBEDDED}, key=str.lower))
CPU_TYPES = tuple(name for name in MODEL_TYPES if name not in NOT_ON_CPU)
TARGET_TYPES = tuple(name for name in CPU_TYPES if name not in REFUSED)
