"""Every published layout of a draft gives the same model as z-lab's, or is refused by name."""

import json

import gguf
import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.sample_utils import make_sampler
from support.draft_files import logits_of, speculators_config, write_gguf_draft
from support.drafts import MASK_ID, draft2_config, draft_config, draft_inputs, draft_weights
from support.folders import save_checkpoint, save_draft
from support.targets import plain_tokens, tiny_target

import mlx_dflash
from mlx_dflash.api import open_session
from mlx_dflash.checkpoints.layouts import zlab_layout
from mlx_dflash.draft.config import DraftConfig
from mlx_dflash.emission import emit
from mlx_dflash.pair import Pair

SLIDING, FULL = "sliding_attention", "full_attention"


def check_same(tmp_path, config, weights, other):
    """Compare the draft in the folder `other` with one saved in z-lab's layout."""
    expected, path = logits_of(save_draft(tmp_path / "zlab", config, weights), config=config)
    logits, proposal = logits_of(other, config=config)
    assert np.array_equal(logits, expected), f"logits differ by {np.abs(logits - expected).max()}"
    assert proposal == path


@pytest.mark.parametrize("make", [draft_config, draft2_config], ids=["v1", "v2"])
def test_speculators_layout_gives_the_same_draft(tmp_path, make):
    config = make(layer_types=[SLIDING, FULL], sliding_window=8, is_causal=None)
    weights = draft_weights(config)
    other = save_draft(tmp_path / "other", speculators_config(config), weights, prefix="model.")
    check_same(tmp_path, config, weights, other)


def test_speculators_window_that_is_not_causal_gives_the_same_draft(tmp_path):
    config = draft_config(layer_types=[SLIDING] * 2, sliding_window=8, is_causal=False)
    weights = draft_weights(config)
    changes = speculators_config(
        draft_config(layer_types=[SLIDING] * 2, sliding_window=8), sliding_window_non_causal=True
    )
    check_same(tmp_path, config, weights, save_draft(tmp_path / "other", changes, weights))


def test_speculators_own_embedding_and_reduced_head_are_used(tmp_path):
    config = draft_config()
    weights = draft_weights(config)
    _, embed, head = draft_inputs(config, 1, seed=9)
    ids = np.array([0, 3, 4, 50, 95])
    extra = {"embed_tokens.weight": embed, "lm_head.weight": head[ids], "verifier_norm.weight": np.ones(32)}
    arrays = {name: mx.array(np.asarray(w, np.float32)) for name, w in (weights | extra).items()}
    arrays |= {"d2t": mx.array(ids - np.arange(5)).astype(mx.int64), "t2d": mx.zeros((97,), mx.bool_)}
    other = save_checkpoint(tmp_path / "other", speculators_config(config, draft_vocab_size=5), arrays)
    logits, proposal = logits_of(other)
    expected, _ = logits_of(save_draft(tmp_path / "zlab", config, weights), embed, head)
    assert np.abs(logits - expected[:, ids]).max() <= 1e-5
    assert proposal == ids[expected[:, ids].argmax(-1)].tolist()


def test_reduced_head_without_weights_uses_rows_of_the_targets(tmp_path):
    config = draft_config()
    weights = draft_weights(config)
    expected, _ = logits_of(save_draft(tmp_path / "zlab", config, weights))
    ids = np.array([1, 2, 40, 96])
    arrays = {name: mx.array(w) for name, w in weights.items()} | {"d2t": mx.array(ids - np.arange(4))}
    logits, proposal = logits_of(save_checkpoint(tmp_path / "other", {**config, "draft_vocab_size": 4}, arrays))
    assert np.abs(logits - expected[:, ids]).max() <= 1e-5
    assert proposal == ids[expected[:, ids].argmax(-1)].tolist()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("is_quantized", [False, True], ids=["float", "quantized"])
@pytest.mark.parametrize("is_tied", [False, True], ids=["untied", "tied"])
def test_text_with_a_reduced_head_is_the_targets_own(tmp_path, is_tied, is_quantized, temperature):
    config = draft_config()
    ids = np.arange(0, 97, 3)
    arrays = {name: mx.array(w) for name, w in draft_weights(config).items()} | {
        "d2t": mx.array(ids - np.arange(len(ids)))
    }
    draft = mlx_dflash.load_draft(str(save_checkpoint(tmp_path, {**config, "draft_vocab_size": len(ids)}, arrays)))
    target = tiny_target(tie_word_embeddings=is_tied)
    if is_quantized:
        nn.quantize(target, group_size=32, bits=4)
    sampler = make_sampler(temp=temperature)
    expected = plain_tokens(target, [3, 1, 4, 1, 5], 40, sampler=sampler, seed=5)
    mx.random.seed(5)
    session = open_session(Pair(target, draft), mx.array([3, 1, 4, 1, 5]), 40, sampler=sampler)
    assert [e.token for e in emit(session, mx.array([3, 1, 4, 1, 5]))] == expected
    hidden = mx.random.normal((1, 3, 32))
    whole = target.model.embed_tokens.as_linear(hidden) if is_tied else target.lm_head(hidden)
    assert mx.allclose(Pair(target, draft).head(hidden), whole[..., mx.array(ids)], atol=1e-5).item()


LAYOUTS = {
    "block_size at the top": dict(block_size=6, dflash=dict(block_size=None)),
    "block_size twice, the nested one counts": dict(block_size=9),
    "ids at the top": dict(
        dflash=dict(mask_token_id=None, target_layer_ids=None), mask_token_id=MASK_ID, target_layer_ids=[0, 2]
    ),
    "rope_parameters": dict(rope_theta=None, rope_parameters={"rope_theta": 10000.0, "rope_type": "default"}),
    "rope_parameters win": dict(rope_theta=5.0, rope_parameters={"rope_theta": 10000.0}),
    "vLLM's aux ids": dict(dflash=dict(target_layer_ids=None, eagle_aux_hidden_state_layer_ids=[1, 3])),
    "vLLM's aux ids beside z-lab's": dict(eagle_aux_hidden_state_layer_ids=[0, 2]),
    "no number of target layers": dict(num_target_layers=None),
    "no head size": dict(head_dim=None),
    "spare keys": dict(auto_map={"AutoModel": "dflash.DFlash"}, surprise=1, dflash=dict(comment="hello")),
    "the target's partial rotation": dict(partial_rotary_factor=0.25),
    "the target's partial rotation in rope_parameters": dict(
        rope_theta=None,
        rope_parameters={"rope_theta": 10000.0, "rope_type": "default", "partial_rotary_factor": 0.25},
    ),
    "SpecForge's flag": dict(dflash=dict(projector_type="dflash")),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_key_spellings_give_the_same_draft(tmp_path, layout):
    config, changes = draft_config(), dict(LAYOUTS[layout])
    weights = draft_weights(config)
    other = draft_config(**changes)
    other["dflash_config"] = {k: v for k, v in other["dflash_config"].items() if v is not None}
    check_same(tmp_path, config, weights, save_draft(tmp_path / "other", other, weights))


def test_flat_keys_of_dflash_2_give_the_same_draft(tmp_path):
    config = draft2_config()
    flat = {**config, **config["dflash_config"], "architectures": ["Qwen3DFlash2Model"]}
    del flat["dflash_config"]
    weights = draft_weights(config)
    check_same(tmp_path, config, weights, save_draft(tmp_path / "other", flat, weights))


def test_use_swa_is_a_window_on_all_layers_that_hides_nothing_of_the_block(tmp_path):
    config = draft_config(layer_types=[SLIDING] * 2, sliding_window=8, is_causal=False)
    weights = draft_weights(config)
    other = draft_config(dict(use_swa=True, swa_window_size=8), layer_types=None)
    check_same(tmp_path, config, weights, save_draft(tmp_path / "other", other, weights))


RENAMES = {
    "SpecForge": lambda n: "model." + n,
    "AngelSlim": lambda n: {
        "fc.weight": "context_proj.weight",
        "hidden_norm.weight": "context_norm.weight",
        "norm.weight": "final_norm.weight",
    }.get(n, n),
    "Muse": lambda n: {"fc.weight": "encoder.fc.weight", "hidden_norm.weight": "encoder.output_norm_enc.weight"}.get(
        n, n
    ),
    "midlayer": lambda n: n.replace("layers.0.", "midlayer."),
    "codebooks as modules": lambda n: n + ".weight" if n.endswith("codebook") else n,
}


@pytest.mark.parametrize("renames", RENAMES)
def test_other_names_of_the_tensors_give_the_same_draft(tmp_path, renames):
    config = draft2_config()
    weights = draft_weights(config)
    renamed = {RENAMES[renames](name): w for name, w in weights.items()}
    assert renamed.keys() != weights.keys()
    check_same(tmp_path, config, weights, save_draft(tmp_path / "other", config, renamed))


def test_spare_copies_of_the_targets_tensors_change_nothing(tmp_path):
    config = draft_config()
    weights = draft_weights(config)
    spare = dict.fromkeys(("embed_tokens.weight", "lm_head.weight", "logit_head.weight"), np.ones((97, 32), np.float32))
    del spare["logit_head.weight"]
    other = save_draft(tmp_path / "other", config, weights | spare | {"rotary_emb.inv_freq": np.ones(4)})
    check_same(tmp_path, config, weights, other)
    draft = mlx_dflash.load_draft(str(other))
    assert "embed_tokens" not in draft and "lm_head" not in draft


def test_a_mask_token_may_be_named_by_its_text(tmp_path):
    config = draft_config()
    weights = draft_weights(config)
    other = save_draft(tmp_path / "other", draft_config(dict(mask_token_id=None, mask_token="<|MASK|>")), weights)
    with pytest.raises(ValueError, match="mask_token_id"):
        mlx_dflash.load_draft(str(other))
    (other / "tokenizer.json").write_text(
        json.dumps({"added_tokens": [{"content": "<|MASK|>", "id": MASK_ID}], "model": {"vocab": {}}})
    )
    check_same(tmp_path, config, weights, other)


def test_a_draft_in_a_subfolder_of_its_target_is_found_under_any_file_name(tmp_path):
    config = draft_config()
    weights = draft_weights(config)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"model_type": "mimo", "architectures": ["MiMo"]}')
    save_draft(tmp_path / "model" / "dflash", config, weights)
    (tmp_path / "model" / "dflash" / "model.safetensors").rename(
        tmp_path / "model" / "dflash" / "dflash_draft_model.safetensors"
    )
    check_same(tmp_path, config, weights, tmp_path / "model")


GGUF_DRAFTS = {
    "v1": draft_config(),
    "v1 sliding with sinks": draft_config(
        dict(attention_sink_bias=True), layer_types=[SLIDING, FULL], sliding_window=8
    ),
    "v2": draft2_config(),
    "v2 sliding": draft2_config(layer_types=[SLIDING] * 2, sliding_window=8),
}


@pytest.mark.parametrize("name", GGUF_DRAFTS)
def test_a_gguf_draft_gives_the_same_draft(tmp_path, name):
    config = GGUF_DRAFTS[name]
    weights = draft_weights(config)
    check_same(tmp_path, config, weights, write_gguf_draft(tmp_path / "draft.gguf", config, weights))


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q5_0", "BF16"])
@pytest.mark.parametrize("make", [draft_config, draft2_config], ids=["v1", "v2"])
def test_quantized_gguf_draft_is_what_the_gguf_package_reads(tmp_path, kind, make):
    kind, config = gguf.GGMLQuantizationType[kind], make()
    weights = draft_weights(config)
    file = write_gguf_draft(tmp_path / "draft.gguf", config, weights, kind)
    read = {
        n: gguf.quants.dequantize(gguf.quants.quantize(w, kind), kind)
        if w.ndim == 2 and w.shape[1] % 32 == 0 and "codebook" not in n
        else w
        for n, w in weights.items()
    }
    expected, _ = logits_of(save_draft(tmp_path / "zlab", config, read), config=config)
    logits, _ = logits_of(file, config=config)
    # Unpacked types become float16 where the gguf package had to unpack them.
    assert np.abs(logits - expected).max() <= 2e-3 * np.abs(expected).max()


REFUSED = {
    "DSpark": (dict(architectures=["DSparkDraftModel"]), "DSpark"),
    "Domino": (dict(dflash=dict(projector_type="domino")), "Domino"),
    "Domino at the top": (dict(projector_type="domino"), "Domino"),
    "DSpark projector": (dict(dflash=dict(projector_type="dspark")), "DSpark"),
    "DFly": (dict(layer_fusion_weights=True), "DFly"),
    "Laguna": (dict(model_type="laguna"), "Laguna"),
    "Markov": (dict(markov_rank=64), "Markov"),
    "shifted labels": (dict(dflash=dict(shift_label=True)), "Domino"),
    "another architecture": (dict(architectures=["SomeDFlashThing"]), "expected one of DFlashDraftModel"),
    "another speculator": (dict(speculators_model_type="eagle3"), "eagle3"),
    "gelu": (dict(hidden_act="gelu"), "silu"),
    "NVFP4": (dict(quantization_config={"quant_algo": "NVFP4", "quant_method": "modelopt"}), "modelopt"),
    "compressed-tensors": (dict(quantization_config={"quant_method": "compressed-tensors"}), "compressed-tensors"),
    "longrope": (dict(rope_scaling=dict(rope_type="longrope", factor=2.0)), "longrope"),
    "half a selector": (dict(dflash=dict(selector_rank=4)), "conv_kernel_size"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_relatives_are_refused_by_name(tmp_path, what):
    changes, message = REFUSED[what]
    config = draft_config(**changes)
    folder = save_draft(tmp_path, config, draft_weights(draft_config()))
    with pytest.raises(ValueError, match=message):
        mlx_dflash.load_draft(str(folder))


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        ("markov_w1.weight", "DSpark"),
        ("confidence_proj.weight", "DSpark"),
        ("joint_proj.weight", "DSpark"),
        ("gate_proj.weight", "DSpark"),
        ("prefix_gru.weight_ih_l0", "Domino"),
        ("embed_proj.0.weight", "Domino"),
        ("layer_fusion_weights", "DFly"),
        ("hidden_correction.gate_proj.weight", "DFly"),
        ("layers.0.self_attn.qkv_proj.weight", "Laguna"),
        ("layers.0.self_attn.g_proj.weight", "Laguna"),
        ("model.aux_hidden_norms.0.weight", "Laguna"),
        ("layers.0.self_attn.q_proj.weight_scale_2", "another tool"),
        ("layers.0.self_attn.q_proj.weight_packed", "another tool"),
        ("surprise.weight", "not part of a DFlash draft"),
    ],
)
def test_tensors_of_relatives_are_refused_by_name(tmp_path, tensor, message):
    config = draft_config()
    weights = draft_weights(config) | {tensor: np.ones((4, 4), np.float32)}
    with pytest.raises(ValueError, match=message):
        mlx_dflash.load_draft(str(save_draft(tmp_path, config, weights)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(dflash=dict(target_layer_ids=None)), "target_layer_ids"),
        (dict(dflash=dict(mask_token_id=None)), "mask_token_id"),
        (dict(dflash=dict(mask_token_id=97)), "outside the vocabulary"),
        (dict(hidden_size=float("nan")), "hidden_size"),
        (dict(rms_norm_eps=float("nan")), "rms_norm_eps"),
        (dict(rope_theta=float("nan")), "rope_theta"),
        (dict(rope_theta="big"), "rope_theta"),
        (dict(rope_scaling=[4]), "objects"),
        (dict(rope_scaling=dict(rope_type="linear", factor=2.0, partial_rotary_factor=0.5)), "partial_rotary_factor"),
        (dict(num_hidden_layers=True), "num_hidden_layers"),
        (dict(num_hidden_layers=None), "num_hidden_layers"),
        (dict(layer_types="full_attention"), "layer_types"),
        (dict(is_causal=None, dflash=dict(target_layer_ids=[0, 4])), "reach beyond"),
        (dict(dflash=dict(eagle_aux_hidden_state_layer_ids=[0, 2], target_layer_ids=None)), "from 1 on"),
        (dict(draft_vocab_size=98), "larger than vocab_size"),
        (dict(draft_vocab_size=50), "no d2t"),
        (dict(quantization={"bits": 4}), "group_size"),
        (dict(dflash=dict(use_swa=True)), "swa_window_size"),
        (dict(layer_types=[SLIDING, FULL], sliding_window=None), None),
        (dict(attention_bias="yes"), "true or false"),
        (dict(dflash=dict(block_size=1)), "block_size"),
        (dict(num_key_value_heads=3), "multiple"),
    ],
)
def test_malformed_values_are_named(change, message):
    config = draft_config(**change)
    if message is None:
        del config["sliding_window"]
        message = "sliding_window"
    if change.get("draft_vocab_size") == 50:
        assert DraftConfig.from_dict(config).draft_vocab_size == 50
        return
    with pytest.raises(ValueError, match=message):
        DraftConfig.from_dict(zlab_layout(config))
