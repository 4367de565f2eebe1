"""The fixtures are what they say: seeded, lively, loadable by mlx-lm, and an oracle that forces accept counts."""

import json

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
from support.byte_tokenizer import BOS_CHAT_TEMPLATE, BOS_ID, CHAT_TEMPLATE, EOS_ID, byte_tokenizer
from support.drafts import draft_config, draft_shapes, draft_weights
from support.folders import save_draft, save_target
from support.oracle import OracleDrafter
from support.targets import (
    TARGET_FAMILIES,
    context_free_target,
    plain_tokens,
    target_config,
    target_weights,
    tied_rows_target,
    tiny_target,
)

PROMPT = [5, 17, 3, 40, 8]
TEXT = "a é 漢😀 b e\u0301"
MESSAGES = [{"role": "user", "content": "hi"}]


def logits(model, tokens=PROMPT):
    return np.array(model(mx.array([tokens])).astype(mx.float32)[0])


@pytest.mark.parametrize("family", TARGET_FAMILIES)
def test_targets_are_seeded_and_their_text_is_not_a_loop(family):
    first, again, other = tiny_target(family), tiny_target(family), tiny_target(family, seed=5)
    assert np.array_equal(logits(first), logits(again))
    assert not np.array_equal(logits(first), logits(other))
    tokens = plain_tokens(first, PROMPT, 40)
    assert len(tokens) == 40
    assert len(set(tokens)) >= 10, f"only {set(tokens)} in 40 tokens"


def test_context_free_target_has_the_given_distribution_everywhere():
    probabilities = np.random.RandomState(3).dirichlet(np.ones(97))
    found = logits(context_free_target(probabilities))
    assert np.abs(found - np.log(probabilities)).max() < 1e-5


def test_tied_rows_target_meets_real_ties_and_the_lower_id_wins():
    model, lower, higher = tied_rows_target(PROMPT)
    tokens = plain_tokens(model, PROMPT, 64)
    rows = logits(model, PROMPT + tokens)[len(PROMPT) - 1 : -1]
    is_tied = (rows[:, lower] == rows.max(1)) & (rows[:, higher] == rows.max(1))
    assert is_tied.sum() >= 2, f"{is_tied.sum()} ties"
    assert lower in tokens and higher not in tokens


def test_sampled_plain_tokens_follow_the_seed():
    model = tiny_target()

    def run(seed):
        return plain_tokens(model, PROMPT, 12, sampler=mx.random.categorical, seed=seed)

    assert run(1) == run(1)
    assert run(1) != run(2)


def test_byte_tokenizer_maps_bytes_to_their_value_and_back():
    tokenizer = byte_tokenizer()
    ids = tokenizer.encode(TEXT)
    assert ids == list(TEXT.encode())
    assert tokenizer.decode(ids) == TEXT
    detokenizer = tokenizer.detokenizer
    for token in ids:
        detokenizer.add_token(token)
    detokenizer.finalize()
    assert detokenizer.text == TEXT


def test_byte_tokenizer_options():
    plain, full = byte_tokenizer(eos=False), byte_tokenizer(bos_in_prompt=True, chat_template=BOS_CHAT_TEMPLATE)
    assert (plain.bos_token_id, plain.eos_token_id, plain.eos_token_ids) == (None, None, set())
    assert not plain.has_chat_template
    assert (full.bos_token_id, full.eos_token_ids) == (BOS_ID, {EOS_ID})
    assert full.encode("ab") == [BOS_ID, 97, 98]
    assert byte_tokenizer(bos=True).encode("ab") == [97, 98]
    assert full.apply_chat_template(MESSAGES) == [BOS_ID, *b"user: hi\n"]


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("family", TARGET_FAMILIES)
def test_saved_targets_load_in_mlx_lm(tmp_path, family, shards):
    config = target_config(family, vocab_size=258)
    model = tiny_target(family, vocab_size=258)
    save_target(tmp_path, model, config, byte_tokenizer(chat_template=CHAT_TEMPLATE), shards)
    loaded, tokenizer = mlx_lm.load(str(tmp_path))
    assert np.array_equal(logits(loaded), logits(model))
    assert type(tokenizer.detokenizer) is type(byte_tokenizer().detokenizer)
    assert tokenizer.eos_token_ids == {EOS_ID}
    # transformers gives a qwen3_5 folder a tokenizer class that composes accents, so none here.
    assert tokenizer.encode(TEXT[:-1]) == list(TEXT[:-1].encode())
    assert tokenizer.apply_chat_template(MESSAGES) == list(b"user: hi\n")
    assert len(list(tmp_path.glob("*.safetensors"))) == shards


def test_a_model_keeps_its_weights_as_numpy():
    weights = target_weights(tiny_target(dtype=mx.bfloat16))
    assert weights["model.layers.0.self_attn.q_proj.weight"].dtype == np.float32
    assert weights["lm_head.weight"].shape == (97, 32)


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
@pytest.mark.parametrize("shards, prefix", [(1, ""), (2, "model.")])
def test_saved_drafts_hold_every_tensor(tmp_path, dtype, shards, prefix):
    config = draft_config(attention_bias=True)
    weights = draft_weights(config, mask_embedding=True)
    save_draft(tmp_path, config, weights, dtype=dtype, prefix=prefix, shards=shards)
    assert json.loads((tmp_path / "config.json").read_text()) == config
    found = {}
    for file in tmp_path.glob("*.safetensors"):
        found |= mx.load(str(file))
    assert set(found) == {prefix + name for name in weights}
    for name, value in weights.items():
        assert mx.array_equal(found[prefix + name], mx.array(value).astype(dtype)), name


def test_draft_weights_are_the_published_layout():
    config = draft_config()
    assert len(draft_shapes(config)) == 11 * 2 + 3
    assert {n: w.shape for n, w in draft_weights(config).items()} == draft_shapes(config)
    assert draft_shapes(draft_config({"target_layer_ids": [3, 1, 1]}))["fc.weight"] == (32, 96)


def test_config_changes_replace_and_remove_keys():
    config = draft_config({"block_size": None, "causal": True}, block_size=4, head_dim=None)
    assert config["block_size"] == 4 and "head_dim" not in config
    assert config["dflash_config"] == {"target_layer_ids": [0, 2], "mask_token_id": 96, "causal": True}
    assert draft_config()["head_dim"] == 8, "a change leaked into the next config"


@pytest.mark.parametrize("accepts", [None, 0, 3, [0, 5, 2, 4, 1, 3]])
def test_oracle_forces_the_accept_counts(accepts):
    continuation = np.random.RandomState(0).randint(0, 97, 80).tolist()
    oracle = OracleDrafter([1, 2, 3, 4], continuation, accepts)
    wanted = [5] if accepts is None else np.atleast_1d(accepts).tolist()
    oracle.extend_context(mx.zeros((1, 4, 2)))
    at, counts = 0, []
    while at + 6 < len(continuation):
        drafts = oracle.propose(mx.array(continuation[at])).tolist()
        assert len(drafts) == oracle.num_drafts == 5
        agreed = [d == t for d, t in zip(drafts, continuation[at + 1 :], strict=False)]
        counts.append((agreed + [False]).index(False))
        at += counts[-1] + 1
        oracle.extend_context(mx.zeros((1, counts[-1] + 1, 2)))
    assert counts == [wanted[i % len(wanted)] for i in range(len(counts))]
    assert oracle.context_length == 4 + at
    assert len(oracle.proposals) == len(counts)


def test_oracle_refuses_an_anchor_that_its_context_does_not_fit():
    oracle = OracleDrafter([1, 2], [7, 8, 9])
    oracle.extend_context(mx.zeros((1, 3, 2)))
    with pytest.raises(AssertionError, match="anchor 7 behind 3 context rows, but the text has 8"):
        oracle.propose(7)
    oracle.rewind(2)
    assert oracle.propose(7, num_drafts=2).tolist() == [8, 9]


def test_oracle_lets_a_real_drafter_see_everything():
    calls = []

    class Recorder:
        def extend_context(self, features):
            calls.append(("extend", features.shape[1]))

        def propose(self, anchor, num_drafts):
            calls.append(("propose", anchor, num_drafts))

        def can_rewind(self, length):
            return length > 0

        def rewind(self, length):
            calls.append(("rewind", length))

        def settle(self):
            calls.append("settle")

    oracle = OracleDrafter([1, 2], [7, 8, 9], inner=Recorder())
    oracle.extend_context(mx.zeros((1, 1, 2)))
    assert oracle.propose(2, 0).tolist() == []
    oracle.extend_context(mx.zeros((1, 1, 2)))
    assert oracle.propose(mx.array([7]), 2).tolist() == [8, 9]
    assert oracle.can_rewind(1) and not oracle.can_rewind(0)
    oracle.rewind(1)
    oracle.settle()
    assert calls == [("extend", 1), ("propose", 2, 0), ("extend", 1), ("propose", 7, 2), ("rewind", 1), "settle"]
