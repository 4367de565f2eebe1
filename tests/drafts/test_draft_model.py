"""The draft network against the numpy reference: logits and context K/V, never only the text."""

import mlx.core as mx
import numpy as np
import pytest
from support.drafts import draft_config, draft_inputs, draft_weights
from support.folders import save_draft
from support.reference import reference_context_kv, reference_draft_logits

import mlx_dflash
from mlx_dflash.dice import Dice
from mlx_dflash.drafter import Drafter

SLIDING, FULL = "sliding_attention", "full_attention"
YARN = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=64)
VARIANTS = {
    "full": {},
    "full causal": dict(is_causal=True),
    "sliding": dict(layer_types=[SLIDING] * 2, sliding_window=8),
    "sliding bidirectional": dict(layer_types=[SLIDING] * 2, sliding_window=8, is_causal=False),
    "mixed": dict(layer_types=[SLIDING, FULL], sliding_window=8),
    "window below the block": dict(layer_types=[SLIDING] * 2, sliding_window=4),
    "window below the block, bidirectional": dict(layer_types=[SLIDING] * 2, sliding_window=4, is_causal=False),
    "yarn": dict(rope_scaling=YARN),
    "yarn in rope_parameters": dict(rope_parameters=dict(YARN, rope_theta=5000.0), rope_theta=None),
    "yarn with mscale alone": dict(rope_scaling=dict(YARN, mscale=0.7)),
    "linear": dict(rope_scaling=dict(rope_type="linear", factor=4.0)),
    "bias": dict(attention_bias=True),
    "softcap": dict(final_logit_softcapping=3.0),
    "one head": dict(num_attention_heads=4, num_key_value_heads=4),
}


def make_drafter(tmp_path, config, weights, embed, head, **options):
    save_draft(tmp_path / "draft", config, weights)
    draft = mlx_dflash.load_draft(str(tmp_path / "draft"))
    table, head = mx.array(embed, mx.float32), mx.array(head, mx.float32)
    return Drafter(draft, lambda ids: table[ids], lambda h: h @ head.T, Dice(), **options)


@pytest.mark.parametrize("mask_embedding", [False, True], ids=["", "mask_embedding"])
@pytest.mark.parametrize("num_context", [5, 8, 9, 40])
@pytest.mark.parametrize("variant", VARIANTS)
def test_draft_logits_equal_the_reference(tmp_path, variant, num_context, mask_embedding):
    config = draft_config(**VARIANTS[variant])
    weights = draft_weights(config, mask_embedding=mask_embedding)
    features, embed, head = draft_inputs(config, num_context)
    drafter = make_drafter(tmp_path, config, weights, embed, head)
    for start in range(0, num_context, 3):  # as the rounds commit them: a few rows at a time
        drafter.extend_context(mx.array(features[None, start : start + 3], mx.float32))
    expected = reference_draft_logits(config, weights, features, 7, embed, head)
    for attempt in ("first", "second"):
        logits = np.array(drafter.draft_logits(7))
        assert logits.shape == expected.shape
        error = np.abs(logits - expected).max()
        assert error <= 1e-5, f"{attempt} proposal is off by {error}"
    assert drafter.context_length == num_context, "a proposal left a trace in the context"


@pytest.mark.parametrize("variant", ["full", "sliding"])
def test_a_pause_projects_seldom_and_leaves_the_same_context(tmp_path, variant, monkeypatch):
    config = draft_config(**VARIANTS[variant])
    weights = draft_weights(config)
    features, embed, head = draft_inputs(config, 60)
    drafter = make_drafter(tmp_path, config, weights, embed, head)
    rows, calls, project = mx.array(features[None], mx.float32), [], drafter.draft.project_context
    monkeypatch.setattr(
        type(drafter.draft),
        "project_context",
        lambda self, some, caches: calls.append(some.shape[1]) or project(some, caches),
    )
    drafter.extend_context(rows[:, :5])
    for length in range(6, 61):
        assert drafter.propose(7, 0).size == 0
        drafter.extend_context(rows[:, length - 1 : length])
        assert drafter.context_length == length
        if length == 33:
            for back in (32, 30, 27):  # the last of them is projected already, or not
                assert drafter.can_rewind(back)
                drafter.rewind(back)
                assert drafter.context_length == back
            drafter.extend_context(rows[:, 27:33])
    assert len(calls) <= 2 + 61 // 16, f"{len(calls)} projections, of {calls} rows"
    error = np.abs(
        np.array(drafter.draft_logits(7)) - reference_draft_logits(config, weights, features, 7, embed, head)
    ).max()
    assert error <= 1e-5, f"a proposal is off by {error}"
    assert drafter.context_length == {c.offset for c in drafter.caches}.pop() == 60


def test_context_kv_equal_the_reference(tmp_path):
    config = draft_config()
    weights = draft_weights(config)
    features, embed, head = draft_inputs(config, 21)
    drafter = make_drafter(tmp_path, config, weights, embed, head)
    drafter.extend_context(mx.array(features[None, :20], mx.float32))
    drafter.extend_context(mx.array(features[None, 20:], mx.float32))
    for cache, (keys, values) in zip(drafter.caches, reference_context_kv(config, weights, features)):
        for ours, expected in zip(cache.keys_and_values(), (keys, values)):
            assert np.abs(np.array(ours[0]) - expected).max() <= 1e-5


@pytest.mark.parametrize("change", [dict(rope_theta=300.0), dict(rope_scaling=dict(YARN, factor=8.0))])
def test_the_drafts_own_rope_counts(tmp_path, change):
    base = draft_config(rope_scaling=YARN)
    changed = draft_config(**{"rope_scaling": YARN, **change})
    weights = draft_weights(base)
    features, embed, head = draft_inputs(base, 9)
    logits = []
    for name, config in (("a", base), ("b", changed)):
        drafter = make_drafter(tmp_path / name, config, weights, embed, head)
        drafter.extend_context(mx.array(features[None], mx.float32))
        logits.append(np.array(drafter.draft_logits(7)))
    assert np.abs(logits[0] - logits[1]).max() > 1e-3
