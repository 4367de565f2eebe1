"""C2, coverage: whatever the rounds keep, both sides' caches are those of a fresh pass over the confirmed text."""

import mlx.core as mx
import numpy as np
import pytest
from support.drafts import MASK_ID, draft_config
from support.runs import (
    PROMPT,
    ROUNDING,
    Watch,
    assert_same_caches,
    draft_run,
    forced_drafter,
    fresh_caches,
    make_draft,
    plain_run,
    tokenizer,
)
from support.targets import plain_tokens, tiny_target

import mlx_dflash
from mlx_dflash.dice import Dice
from mlx_dflash.drafter import Drafter
from mlx_dflash.models.structure import Structure
from mlx_dflash.target import Target

SLIDING = dict(layer_types=["sliding_attention", "full_attention"], sliding_window=8)
PROMPTS = {n: np.random.RandomState(n).randint(0, 97, n).tolist() for n in (1, 2, 7, 40)}


def finish(watch):
    """Run all rounds; after each, check what is covered. Return the text."""
    text = []
    for latest in watch.rounds():
        text += latest.verdict.tokens
        confirmed = len(watch.prompt) + len(text) - 1
        assert watch.covered == {confirmed}, f"caches cover {watch.covered}; {confirmed} tokens are confirmed"
    return text


@pytest.mark.parametrize("length", PROMPTS)
@pytest.mark.parametrize("block_size", [2, 3, 6, 16])
def test_the_target_cache_is_a_fresh_pass_for_any_accept_counts(block_size, length):
    accepts = np.random.RandomState(block_size).permutation(block_size).tolist()
    watch = Watch(
        tiny_target(), PROMPTS[length], accepts, num_tokens=sum(accepts) + block_size + 3, num_drafts=block_size - 1
    )
    text = finish(watch)
    assert text == watch.text[: len(text)]
    expected, _ = fresh_caches(watch.model, watch.prompt + text[:-1])
    assert_same_caches(watch.target.caches, expected)


@pytest.mark.parametrize("family", ["qwen3", "llama_sliding", "gemma3_text"])
@pytest.mark.parametrize("accepts", range(6))
def test_rounds_that_all_keep_the_same_number_give_the_targets_text(family, accepts):
    watch = Watch(tiny_target(family), PROMPTS[7], accepts, num_tokens=20)
    text = finish(watch)
    assert text == watch.text[:20]
    counts = watch.session.stats.accepted
    assert counts[-1] == sum(counts) or sum(counts) - counts[-1] <= 1, f"rounds by kept drafts: {counts}"
    expected, _ = fresh_caches(watch.model, watch.prompt + text[:-1])
    assert_same_caches(watch.target.caches, expected)


def test_two_rows_of_a_block_do_not_see_rows_that_were_refused_before():
    watch = Watch(tiny_target(), PROMPT, [0, 4, 1, 5, 2, 3, 0, 0, 5], num_tokens=60)
    text = []
    for latest in watch.rounds():
        text += latest.verdict.tokens
        expected, _ = fresh_caches(watch.model, watch.prompt + text[:-1])
        assert_same_caches(watch.target.caches, expected, case=f"after {len(text)} tokens")


DRAFTS = {"full": {}, "sliding": dict(layer_types=["sliding_attention"] * 2), "mixed": SLIDING}


@pytest.mark.parametrize("variant", DRAFTS)
def test_the_draft_context_after_any_rounds_is_a_fresh_one(variant):
    draft = make_draft(draft_config(**DRAFTS[variant]))
    watch = Watch(tiny_target(), PROMPT, [2, 0, 5, 1, 4, 3, 0, 2], num_tokens=40, draft=draft)
    structure, text = Structure(watch.model), []
    for latest in watch.rounds():
        text += latest.verdict.tokens
        _, context = fresh_caches(watch.model, watch.prompt + text[:-1], draft)
        fresh = Drafter(draft, structure.embed, structure.unembed, Dice(), context)
        assert watch.inner.context_length == fresh.context_length == len(PROMPT) + len(text) - 1
        expected = np.array(fresh.draft_logits(text[-1]))
        for attempt in ("first", "second"):
            error = np.abs(np.array(watch.inner.draft_logits(text[-1])) - expected).max()
            assert error <= ROUNDING, f"{attempt} proposal after {len(text)} tokens is off by {error}"


@pytest.mark.parametrize("place", range(6))
def test_a_stop_token_anywhere_in_a_block_ends_the_text_and_the_caches(place, monkeypatch):
    """place: slot of the block at which the stop token stands; 5 is the target's own token after five drafts."""
    model, draft = tiny_target(), make_draft()
    text = plain_tokens(model, PROMPT, 20)
    at = next(i for i in range(1 + place, 20) if text[i] not in text[:i])
    first = at - place - 1  # tokens of the rounds before, behind the first one
    accepts = [first - 1] if 0 < first <= 6 else [0] * first
    forced = forced_drafter(PROMPT, text, [*accepts, 5, 5])
    monkeypatch.setattr("mlx_dflash.pair.Drafter", forced)
    cache = mlx_dflash.make_prompt_cache(model, draft)
    ours = draft_run(model, draft, PROMPT, [text[at]], max_tokens=40, prompt_cache=cache)
    plain = plain_run(model, PROMPT, [text[at]], max_tokens=40)
    assert (ours.tokens, ours.texts, ours.finish_reason) == (plain.tokens, plain.texts, "stop")
    assert ours.tokens == text[: at + 1]
    assert ours.last.generation_tokens == at + 1
    target, context = fresh_caches(model, PROMPT + ours.tokens, draft)
    assert_same_caches(cache[:4], target)
    assert_same_caches(cache[4:], context)


def test_the_first_of_two_stop_tokens_in_a_block_ends_the_text(monkeypatch):
    model, draft = tiny_target(), make_draft()
    text = plain_tokens(model, PROMPT, 40)
    first, second = [i for i in range(40) if text[i] not in text[:i]][2:4]
    accepts = [0] * (first - 2) + [5]  # so that both stand in one block, or the second as its last token
    assert second - first < 5
    monkeypatch.setattr("mlx_dflash.pair.Drafter", forced_drafter(PROMPT, text, accepts))
    ours = draft_run(model, draft, PROMPT, [text[first], text[second]], max_tokens=40)
    assert ours.tokens == text[: first + 1]


@pytest.mark.parametrize("accepts", [0, 2, 5])
def test_a_mask_id_that_is_a_real_token_changes_nothing(accepts, monkeypatch):
    model = tiny_target()
    text = plain_tokens(model, PROMPT, 30)
    mask = text[7]
    prompt = [*PROMPT[:2], mask, *PROMPT[3:]]
    text = plain_tokens(model, prompt, 30)
    mask = mask if mask in text else text[3]
    draft = make_draft(draft_config(dict(mask_token_id=mask)))
    monkeypatch.setattr("mlx_dflash.pair.Drafter", forced_drafter(prompt, text, [accepts]))
    ours = draft_run(model, draft, prompt, max_tokens=30)
    assert ours.tokens == text
    assert mask in ours.tokens and mask != MASK_ID


@pytest.mark.parametrize("block_size", [1, 2, 6, 16])
def test_exactly_max_tokens_are_given(block_size, monkeypatch):
    model = tiny_target(num_hidden_layers=2)
    config = draft_config(dict(block_size=max(block_size, 2), target_layer_ids=[0, 1]), num_target_layers=2)
    draft = make_draft(config)
    text = plain_tokens(model, PROMPT, 2 * block_size + 1)
    monkeypatch.setattr("mlx_dflash.pair.Drafter", forced_drafter(PROMPT, text, [15]))
    lengths = sorted({1, 2, block_size, block_size + 1, 2 * block_size, 2 * block_size + 1})
    for max_tokens in lengths:
        cache = mlx_dflash.make_prompt_cache(model, draft)
        ours = draft_run(model, draft, PROMPT, max_tokens=max_tokens, block_size=block_size, prompt_cache=cache)
        assert ours.tokens == text[:max_tokens], (
            f"max_tokens {max_tokens}: {ours.tokens} instead of {text[:max_tokens]}"
        )
        assert ours.finish_reason == "length"
        covered = {c.offset for c in cache}
        assert covered == {len(PROMPT) + max_tokens}, f"max_tokens {max_tokens}: caches cover {covered}"


def test_a_block_of_one_is_plain_decoding():
    model, draft = tiny_target(), make_draft()
    ours = draft_run(model, draft, PROMPT, max_tokens=9, block_size=1)
    assert ours.tokens == plain_tokens(model, PROMPT, 9)
    assert ours.last.stats.as_dict()["rounds"] == 8 and ours.last.stats.num_drafted == 0


@pytest.mark.parametrize("prompt", [[7], [7, 9]])
def test_the_shortest_prompts_work(prompt):
    model, draft = tiny_target(), make_draft()
    assert draft_run(model, draft, prompt, max_tokens=9).tokens == plain_tokens(model, prompt, 9)


def test_without_a_limit_the_text_goes_on():
    model, draft = tiny_target(), make_draft()
    ours = draft_run(model, draft, PROMPT, max_tokens=-1, take=30)
    assert ours.tokens == plain_tokens(model, PROMPT, 30)
    assert ours.finish_reason is None


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(max_tokens=0), "max_tokens must be positive"),
        (dict(max_tokens=-2), "max_tokens must be positive"),
        (dict(prompt=[]), "at least one token"),
        (dict(prompt=[[1, 2]]), "one sequence"),
        (dict(prompt=[1, 97]), "vocabulary has 97"),
        (dict(prompt=[-1]), "vocabulary has 97"),
        (dict(block_size=7), "block_size must be 1 to 6"),
        (dict(block_size=0), "block_size must be 1 to 6"),
        (dict(num_draft_tokens=6), "block_size must be 1 to 6"),
        (dict(prefill_step_size=0), "prefill_step_size"),
        (dict(max_kv_size=4), "more than the 4 first tokens"),
        (dict(kv_bits=3), "kv_bits must be 2, 4 or 8"),
        (dict(input_embeddings=mx.zeros((5, 32))), "input_embeddings is not supported together with a draft"),
        (dict(block_size=3, num_draft_tokens=2), "not both"),
        (dict(stop_strings=[""]), "non-empty"),
    ],
)
def test_arguments_without_sense_are_refused_before_anything_is_computed(change, message):
    model, draft = tiny_target(), make_draft()
    with pytest.raises(ValueError, match=message):
        mlx_dflash.stream_generate(
            model, tokenizer(), draft_model=draft, **{"prompt": PROMPT, "max_tokens": 5, **change}
        )


def test_no_position_beyond_the_context_limit_is_computed(monkeypatch):
    """A prompt and a budget that end exactly at max_position_embeddings never cover more than that."""
    limit = 32
    model = tiny_target(max_position_embeddings=limit)
    draft = make_draft(draft_config(max_position_embeddings=limit))
    text = plain_tokens(model, PROMPT, limit - len(PROMPT))
    monkeypatch.setattr("mlx_dflash.pair.Drafter", forced_drafter(PROMPT, text, [5, 1, 0, 3]))
    ends = []
    attention = type(model.layers[0].self_attn)
    original = attention.__call__

    def watched(self, x, mask=None, cache=None):
        ends.append(cache.offset + x.shape[1])
        return original(self, x, mask, cache)

    monkeypatch.setattr(attention, "__call__", watched)
    cache = mlx_dflash.make_prompt_cache(model, draft)
    ours = draft_run(model, draft, PROMPT, max_tokens=limit - len(PROMPT), prompt_cache=cache)
    assert ours.tokens == text
    assert max(ends) <= limit, f"position {max(ends) - 1} was computed; the limit is {limit}"


def test_the_acceptance_statistics_are_those_of_the_oracle(monkeypatch):
    model, draft = tiny_target(), make_draft()
    text = plain_tokens(model, PROMPT, 40)
    forced = forced_drafter(PROMPT, text, [5, 0, 3, 1])
    monkeypatch.setattr("mlx_dflash.pair.Drafter", forced)
    stats = draft_run(model, draft, PROMPT, max_tokens=40).last.stats
    assert stats.num_drafted == sum(forced.made)
    assert stats.num_accepted == sum(forced.kept)
    assert 0 < stats.acceptance_rate == sum(forced.kept) / sum(forced.made) <= 1
    assert stats.acceptance_length == pytest.approx(1 + sum(forced.kept) / len(forced.kept))
    assert sum(n * c for n, c in enumerate(stats.accepted)) + stats.num_rounds + 1 == 40


def test_draft_taps_in_any_order_reach_the_draft_in_that_order():
    model, outputs = tiny_target(), []
    hidden = model.model.embed_tokens(mx.array([PROMPT]))
    for layer in model.layers:
        hidden = layer(hidden, "causal", None)
        outputs.append(np.array(hidden[0]))
    for taps in ([0], [3], [1, 3], [3, 1], [2, 2, 0]):
        features = []
        Target(model, taps).prefill(mx.array(PROMPT), features.append)
        expected = np.concatenate([outputs[i] for i in taps], axis=-1)
        error = np.abs(np.array(features[0][0]) - expected).max()
        assert error <= 1e-5, f"taps {taps}: features are off by {error}"


@pytest.mark.parametrize("taps", [[4], [0, 9]])
def test_taps_beyond_the_target_are_refused(taps):
    with pytest.raises(ValueError, match="4 layers, 0 to 3"):
        Target(tiny_target(), taps)


def test_a_negative_tap_is_refused():
    with pytest.raises(ValueError, match="0 to 3"):
        Target(tiny_target(), [-1])
