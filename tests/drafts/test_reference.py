"""The numpy reference against z-lab's torch reference, transformers, mlx-lm, and the properties it must have."""

import mlx.core as mx
import numpy as np
import pytest
from support.drafts import MASK_ID, draft_config, draft_inputs, draft_weights
from support.reference import (
    reference_context_kv,
    reference_draft_logits,
    reference_target,
    rms_norm,
    rope_frequencies,
)
from support.targets import target_config, target_weights, tiny_target

ANCHOR = 11
SLIDING, FULL = "sliding_attention", "full_attention"
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}

# From z-lab's torch reference (PyPI: dflash 0.1.0, torch 2.13.0, transformers 5.24.0), run in float32 on these
# fixtures with 9 context rows: logits at (row, token) (0, 0), (1, 20), (2, 40), (4, 96). Over all logits the
# largest difference to the reference was 4.0e-6 here, and 8.4e-6 with 1, 5, 8, 9 and 40 context rows.
TORCH_LOGITS = {
    "full": ({}, [0.396915, -0.196196, 1.959205, 0.071525]),
    "full causal": ({"is_causal": True}, [1.010838, -0.366579, 1.814528, -0.004525]),
    "sliding": ({"layer_types": [SLIDING, SLIDING]}, [0.562157, -0.202619, 0.467766, -0.853731]),
    "sliding bidirectional": (
        {"layer_types": [SLIDING, SLIDING], "is_causal": False},
        [-0.539669, 0.141158, 0.705151, -0.791783],
    ),
    "mixed": ({"layer_types": [SLIDING, FULL]}, [0.029935, 0.189369, 0.022181, -0.808219]),
    "bias and softcap": (
        {"attention_bias": True, "final_logit_softcapping": 5.0},
        [1.081411, -1.238336, -3.390807, 0.34756],
    ),
    "yarn": (
        {"rope_theta": None, "rope_parameters": {**YARN, "rope_theta": 1000.0}},
        [0.015602, 0.280002, 1.804661, -0.328988],
    ),
    "linear": (
        {"rope_scaling": {"type": "linear", "factor": 4.0}},
        [0.313799, -0.369056, 0.700315, -0.973709],
    ),
}

# From transformers 5.24.0, modeling_rope_utils.ROPE_INIT_FUNCTIONS with a Qwen3Config of these keys.
ROPES = {
    "yarn": (
        {"rope_scaling": {**YARN, "original_max_position_embeddings": 32768}, "rope_theta": 1e6, "head_dim": 16},
        [1.0, 0.1778279, 0.03162278, 0.00421756, 0.0005, 4.445699e-05, 7.905694e-06, 1.405853e-06],
        1.138629436111989,
    ),
    "yarn with mscale, without truncation": (
        {
            "rope_parameters": {
                **YARN,
                "factor": 8.0,
                "rope_theta": 1000.0,
                "beta_fast": 16,
                "beta_slow": 2,
                "mscale": 1.0,
                "mscale_all_dim": 0.5,
                "truncate": False,
            },
            "head_dim": 8,
        },
        [1.0, 0.02222849, 0.003952847, 0.0007029267],
        1.094179988101349,
    ),
    "yarn with mscale alone, which counts for nothing": (
        {"rope_parameters": {**YARN, "rope_theta": 1000.0, "mscale": 0.7}, "head_dim": 8},
        [1.0, 0.1111425, 0.007905695, 0.001405853],
        1.138629436111989,
    ),
    "yarn with attention_factor, without original length": (
        {
            "rope_scaling": {"type": "yarn", "factor": 16.0, "attention_factor": 1.25},
            "rope_theta": 10000.0,
            "max_position_embeddings": 2048,
            "head_dim": 8,
        },
        [1.0, 0.1, 0.0053125, 6.25e-05],
        1.25,
    ),
    "linear": (
        {"rope_scaling": {"type": "linear", "factor": 4.0}, "rope_theta": 10000.0, "head_dim": 8},
        [0.25, 0.025, 0.0025, 0.00025],
        1.0,
    ),
}


def logits_of(config, num_context=9, edit=None, **options):
    """The reference's logits on the fixtures' weights and inputs; edit(features, embed) may change the inputs."""
    features, embed, head = draft_inputs(config, num_context)
    if edit is not None:
        edit(features, embed)
    weights = draft_weights(config, mask_embedding=options.pop("mask_embedding", False))
    return reference_draft_logits(config, weights, features, ANCHOR, embed, head, **options)


def difference(a, b):
    return np.abs(a - b).max()


@pytest.mark.parametrize("case", TORCH_LOGITS)
def test_logits_equal_the_torch_reference(case):
    changes, expected = TORCH_LOGITS[case]
    logits = logits_of(draft_config(**changes))
    assert logits.shape == (5, 97)
    found = logits[[0, 1, 2, 4], [0, 20, 40, 96]]
    assert difference(found, expected) < 1e-5, f"got {found}, torch gives {expected}"


@pytest.mark.parametrize("case", ROPES)
def test_rope_equals_transformers(case):
    config, frequencies, factor = ROPES[case]
    found, found_factor = rope_frequencies(config)
    np.testing.assert_allclose(found, frequencies, rtol=1e-6)
    assert found_factor == pytest.approx(factor, rel=1e-12)


def test_both_spellings_of_rope_give_the_same_logits():
    older = draft_config(rope_scaling=YARN, rope_theta=500.0)
    newer = draft_config(rope_theta=None, rope_parameters={**YARN, "rope_theta": 500.0})
    assert difference(logits_of(older), logits_of(newer)) == 0


def test_rope_theta_inside_the_dict_wins():
    both = draft_config(rope_theta=777.0, rope_parameters={"rope_type": "default", "rope_theta": 1e6})
    assert difference(logits_of(both), logits_of(draft_config(rope_theta=1e6))) == 0


def test_unknown_rope_type_is_refused_by_name():
    with pytest.raises(ValueError, match="longrope"):
        rope_frequencies(draft_config(rope_scaling={"rope_type": "longrope"}))


@pytest.mark.parametrize("changes", [{"rope_theta": 500.0}, {"rope_scaling": YARN}])
def test_rope_settings_change_the_logits(changes):
    moved = difference(logits_of(draft_config(**changes)), logits_of(draft_config()))
    assert moved > 1e-2, f"logits moved by {moved}"


@pytest.mark.parametrize("first_position", [1, 1000])
@pytest.mark.parametrize("layer_types", [[FULL, FULL], [SLIDING, FULL]])
def test_only_relative_positions_matter(first_position, layer_types):
    config = draft_config(layer_types=layer_types)
    moved = difference(logits_of(config), logits_of(config, first_position=first_position))
    assert moved < 1e-10, f"logits moved by {moved}"


def test_a_window_beyond_the_context_equals_full_attention():
    wide = draft_config(layer_types=[SLIDING] * 2, is_causal=False, sliding_window=15)
    assert difference(logits_of(wide), logits_of(draft_config())) == 0


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("row, is_seen", [(32, False), (33, True)])
def test_a_window_of_8_shows_the_anchor_7_context_rows(is_causal, row, is_seen):
    config = draft_config(layer_types=[SLIDING] * 2, is_causal=is_causal)

    def edit(features, embed):
        features[: row + 1] += 1.0

    moved = difference(logits_of(config, 40, edit), logits_of(config, 40))
    assert (moved > 1e-3) if is_seen else (moved == 0), f"logits moved by {moved}"


def test_a_causal_block_does_not_see_its_own_tail():
    config = draft_config(is_causal=True)
    assert difference(logits_of(config, block_size=4), logits_of(config)[:3]) < 1e-12
    assert difference(logits_of(draft_config(), block_size=4), logits_of(draft_config())[:3]) > 1e-2


@pytest.mark.parametrize("layer_type, is_causal_by_default", [(FULL, False), (SLIDING, True)])
def test_causality_precedence(layer_type, is_causal_by_default):
    def logits(dflash=None, **changes):
        return logits_of(draft_config(dflash=dflash, layer_types=[layer_type] * 2, **changes))

    causal, bidirectional = logits(is_causal=True), logits(is_causal=False)
    assert difference(causal, bidirectional) > 1e-2
    assert difference(logits(), causal if is_causal_by_default else bidirectional) == 0
    assert difference(logits({"causal": True}), causal) == 0
    assert difference(logits({"causal": False}), bidirectional) == 0
    assert difference(logits({"causal": True}, is_causal=False), bidirectional) == 0


def test_a_mask_embedding_replaces_the_mask_row():
    config = draft_config()

    def spoil_mask_row(features, embed):
        embed[MASK_ID] += 1.0

    assert difference(logits_of(config, edit=spoil_mask_row), logits_of(config)) > 1e-2
    learned = logits_of(config, mask_embedding=True)
    assert difference(learned, logits_of(config)) > 1e-2
    assert difference(logits_of(config, edit=spoil_mask_row, mask_embedding=True), learned) == 0


def test_options_inside_dflash_config_win():
    config = draft_config(
        dflash={"block_size": 3, "final_logit_softcapping": 2.0}, block_size=9, final_logit_softcapping=9.0
    )
    logits = logits_of(config)
    assert logits.shape == (2, 97)
    assert 1.5 < np.abs(logits).max() < 2


def test_context_kv_of_chunks_equals_that_of_the_whole():
    config = draft_config()
    weights, (features, _, _) = draft_weights(config), draft_inputs(config, 12)
    whole = reference_context_kv(config, weights, features, first_position=3)
    first = reference_context_kv(config, weights, features[:5], first_position=3)
    second = reference_context_kv(config, weights, features[5:], first_position=8)
    assert len(whole) == 2
    for layer in range(2):
        for kind in range(2):
            assert whole[layer][kind].shape == (2, 12, 8)
            joined = np.concatenate([first[layer][kind], second[layer][kind]], axis=1)
            assert difference(whole[layer][kind], joined) < 1e-12


@pytest.mark.parametrize("family", ["qwen3", "llama", "llama_sliding"])
def test_target_reference_equals_mlx_lm_after_every_layer(family):
    config, model = target_config(family), tiny_target(family)
    weights, tokens = target_weights(model), (np.arange(30) * 7) % 97
    logits, streams = reference_target(config, weights, tokens)
    found = np.array(model(mx.array(tokens)[None])[0])
    assert difference(found, logits) < 1e-4, f"logits differ by {difference(found, logits)}"
    assert [s.shape for s in streams] == [(30, 32)] * 4
    # A model cut off behind layer i is mlx-lm's own word on the stream there.
    layers = model.model.layers
    for i in (1, 2):
        model.model.layers = layers[: i + 1]
        found = np.array(model(mx.array(tokens)[None])[0])
        normed = rms_norm(streams[i], weights["model.norm.weight"], config["rms_norm_eps"])
        assert difference(found, normed @ weights["lm_head.weight"].T) < 1e-4
