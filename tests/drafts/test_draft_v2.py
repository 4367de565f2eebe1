"""DFlash 2 and the rarer options of drafts against the numpy reference: logits, paths, never only the text."""

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.sample_utils import make_sampler
from support.drafts import draft2_config, draft_config, draft_inputs, draft_weights
from support.folders import save_draft
from support.reference_v2 import reference_v2_logits, reference_v2_walk
from support.targets import plain_tokens, tiny_target

import mlx_dflash
from mlx_dflash.api import open_session
from mlx_dflash.dice import Dice
from mlx_dflash.drafter import Drafter
from mlx_dflash.emission import emit
from mlx_dflash.pair import Pair

SLIDING, FULL = "sliding_attention", "full_attention"
VERSION_2 = {
    "full": draft2_config(),
    "full causal": draft2_config(is_causal=True),
    "sliding": draft2_config(layer_types=[SLIDING] * 2, sliding_window=8),
    "sliding causal": draft2_config(layer_types=[SLIDING] * 2, sliding_window=8, is_causal=None),
    "window below the block": draft2_config(layer_types=[SLIDING, FULL], sliding_window=4),
    "three taps": draft2_config(dict(conv_kernel_size=3, conv_group_size=8)),
    "more taps than rows": draft2_config(dict(conv_kernel_size=9, block_size=3)),
    "scales": draft2_config(dict(input_embedding_scale=0.5, output_multiplier=0.2, final_logit_softcapping=3.0)),
}
YARN = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=64)
OPTIONS = {
    "yarn, its factor given": draft_config(rope_scaling=dict(YARN, attention_factor=1.3)),
    "yarn, not truncated": draft_config(rope_scaling=dict(YARN, truncate=False, beta_fast=16, beta_slow=2)),
    "yarn, both mscales": draft_config(rope_scaling=dict(YARN, mscale=1.0, mscale_all_dim=0.5)),
    "sinks": draft_config(dict(attention_sink_bias=True)),
    "sinks sliding": draft_config(
        dict(attention_sink_bias=True), layer_types=[SLIDING] * 2, sliding_window=8, is_causal=False
    ),
    "value scale": draft_config(dict(attention_value_scale=0.7)),
    "logit scale": draft_config(logit_scale=0.3),
    "embedding scale": draft_config(dict(input_embedding_scale=5.0)),
}


def make_drafter(tmp_path, config, weights, embed, head, dice=None):
    save_draft(tmp_path / "draft", config, weights)
    draft = mlx_dflash.load_draft(str(tmp_path / "draft"))
    table, head = mx.array(embed, mx.float32), mx.array(head, mx.float32)
    return Drafter(draft, lambda ids: table[ids], lambda h: h @ head.T, dice or Dice())


@pytest.mark.parametrize("mask_embedding", [False, True], ids=["", "mask_embedding"])
@pytest.mark.parametrize("num_context", [1, 8, 40])
@pytest.mark.parametrize("variant", [*VERSION_2, *OPTIONS])
def test_logits_and_proposal_equal_the_reference(tmp_path, variant, num_context, mask_embedding):
    config = (VERSION_2 | OPTIONS)[variant]
    weights = draft_weights(config, mask_embedding=mask_embedding)
    features, embed, head = draft_inputs(config, num_context)
    drafter = make_drafter(tmp_path, config, weights, embed, head)
    for start in range(0, num_context, 3):
        drafter.extend_context(mx.array(features[None, start : start + 3], mx.float32))
    expected, hidden = reference_v2_logits(config, weights, features, 7, embed, head)
    error = np.abs(np.array(drafter.draft_logits(7)) - expected).max()
    assert error <= 5e-5, f"logits are off by {error}"
    if variant in VERSION_2:
        path, _ = reference_v2_walk(config, weights, expected, hidden, 7)
    else:
        path = expected.argmax(-1).tolist()
    for _ in range(2):
        assert drafter.propose(7, 99).tolist() == path
    assert drafter.context_length == num_context


def test_sample_from_anchor_reads_every_row(tmp_path):
    config = draft_config(sample_from_anchor=True)
    weights = draft_weights(config)
    features, embed, head = draft_inputs(config, 9)
    drafter = make_drafter(tmp_path, config, weights, embed, head)
    drafter.extend_context(mx.array(features[None], mx.float32))
    expected, _ = reference_v2_logits(config, weights, features, 7, embed, head, from_anchor=True)
    assert drafter.num_drafts == config["dflash_config"]["block_size"] == len(expected)
    assert np.abs(np.array(drafter.draft_logits(7)) - expected).max() <= 1e-5


def test_selector_path_at_temperature_follows_the_shared_dice(tmp_path):
    """With a target whose logits are the selector's scores, every draft of the walk is what the target rolls."""
    config = draft2_config()
    weights = draft_weights(config)
    features, embed, head = draft_inputs(config, 9)
    dice = Dice(make_sampler(temp=1.0))
    mx.random.seed(11)
    dice.begin(mx.array([1, 2]))
    drafter = make_drafter(tmp_path, config, weights, embed, head, dice)
    drafter.extend_context(mx.array(features[None], mx.float32))
    drafts = drafter.propose(7, 99)
    logits, hidden = reference_v2_logits(config, weights, features, 7, embed, head)
    rows, previous = np.full((len(logits) + 1, len(embed)), -np.inf, np.float32), 7
    rows[-1] = 0
    for i, draft in enumerate(drafts.tolist()):
        _, scored = reference_v2_walk(config, weights, logits[i : i + 1], hidden[i : i + 1], previous)
        for token, score in scored[0].items():
            rows[i, token] = 1.5 * score
        previous = draft
    rolled = dice.roll(mx.array(rows), drafts)
    assert rolled.tokens[:-1] == drafts.tolist()


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_text_with_dflash_2_is_the_targets_own(tmp_path, temperature):
    config = draft2_config(layer_types=[SLIDING] * 2, sliding_window=8)
    save_draft(tmp_path, config, draft_weights(config))
    target, draft = tiny_target(), mlx_dflash.load_draft(str(tmp_path))
    sampler = make_sampler(temp=temperature)
    expected = plain_tokens(target, [3, 1, 4, 1, 5], 60, sampler=sampler, seed=5)
    mx.random.seed(5)
    session = open_session(Pair(target, draft), mx.array([3, 1, 4, 1, 5]), 60, sampler=sampler)
    assert [e.token for e in emit(session, mx.array([3, 1, 4, 1, 5]))] == expected
