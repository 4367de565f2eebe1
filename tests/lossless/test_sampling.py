"""Sampling: every option and the seed count, the distribution is the target's, the random stream the caller's."""

from functools import cache

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.sample_utils import make_logits_processors, make_sampler
from support.drafts import draft_config
from support.runs import PROMPT, draft_run, forced_drafter, make_draft, plain_run, small_pair, tokenizer
from support.targets import context_free_target, plain_tokens, tiny_target

import mlx_dflash

PROBABILITIES = np.array([0.4, 0.25, 0.15, 0.1, 0.06, 0.04])


NUM_TOKENS, SEED = 400, 8


@cache
def context_free_run(**options):
    """A run of a target whose distribution is PROBABILITIES everywhere, cut to two layers."""
    model = context_free_target(PROBABILITIES)
    del model.model.layers[2:]
    dflash = dict(mask_token_id=5, target_layer_ids=[0, 1])
    draft = make_draft(
        draft_config(dflash, vocab_size=6, num_target_layers=2, num_hidden_layers=1, layer_types=["full_attention"]),
        seed=SEED,
    )
    return draft_run(model, draft, [1, 2], seed=11, max_tokens=NUM_TOKENS, sampler=make_sampler(**options))


def chi_square(counts, probabilities):
    counts, expected = counts[probabilities > 0], probabilities[probabilities > 0] * counts.sum()
    return float(((counts - expected) ** 2 / expected).sum())


@pytest.mark.parametrize("options", [dict(temp=1.0), dict(temp=1.0, top_k=3), dict(temp=0.7)], ids=str)
def test_sampled_tokens_have_the_targets_distribution(options):
    """Independently of what the draft proposes; 11.07 and 20.5 are the 95% and 99.9% points of chi-square for 5."""
    run = context_free_run(**options)
    p = PROBABILITIES ** (1 / options["temp"])
    if "top_k" in options or "top_p" in options:
        p[3:] = 0
    p = p / p.sum()
    counts = np.bincount(run.tokens, minlength=6)
    assert counts[p == 0].sum() == 0, f"tokens that are excluded were given: {counts}"
    distance = chi_square(counts, p)
    assert distance < 20.5, f"counts {counts}, expected {np.round(NUM_TOKENS * p)}: chi-square {distance:.1f}"
    assert run.last.stats.num_accepted > 20, f"only {run.last.stats.num_accepted} drafts were kept"


def test_neighbouring_tokens_are_independent():
    """A kept draft must not tell anything about the token after it."""
    tokens = np.minimum(context_free_run(temp=1.0).tokens, 3)  # the rare ones together, so that no pair is too rare
    p = np.append(PROBABILITIES[:3], PROBABILITIES[3:].sum())
    pairs = np.zeros((4, 4))
    np.add.at(pairs, (tokens[:-1], tokens[1:]), 1)
    distance = chi_square(pairs.ravel(), np.outer(p, p).ravel())
    assert distance < 37.7, f"chi-square {distance:.1f}; 37.7 is the 99.9% point for 15 degrees of freedom"


@pytest.mark.parametrize(
    "options", [dict(temp=0.7, top_k=1), dict(temp=0.7, top_p=1e-6), dict(temp=0.7, min_p=1.0), dict(temp=0)], ids=str
)
def test_settings_that_leave_one_token_are_greedy(options):
    model, draft = tiny_target(), make_draft()
    expected = plain_tokens(model, PROMPT, 20)
    for seed in (1, 2):
        assert (
            draft_run(model, draft, PROMPT, seed=seed, max_tokens=20, sampler=make_sampler(**options)).tokens
            == expected
        )


def test_a_logit_bias_counts():
    model, draft = tiny_target(), make_draft()
    processors = make_logits_processors(logit_bias={33: 1000.0})
    assert draft_run(model, draft, PROMPT, max_tokens=8, logits_processors=processors).tokens == [33] * 8


def test_the_seed_counts_and_none_is_set_behind_the_callers_back():
    model, draft = tiny_target(), make_draft()

    def text(seed=None):
        if seed is not None:
            mx.random.seed(seed)
        responses = mlx_dflash.stream_generate(
            model, tokenizer(), PROMPT, max_tokens=12, draft_model=draft, sampler=make_sampler(1.0)
        )
        return [r.token for r in responses]

    assert text(1) == text(1) != text(2)
    mx.random.seed(1)
    first, second = text(), text()
    assert first == text(1)
    assert first != second, "a second run without a seed gave the same text"


def test_a_sampler_gets_single_rows_of_log_probabilities():
    model, draft = tiny_target(), make_draft()
    shapes, sums = [], []

    def sampler(logprobs):
        shapes.append(logprobs.shape)
        sums.append(mx.sum(mx.exp(logprobs)).item())
        return mx.array([7], mx.int32)

    assert draft_run(model, draft, PROMPT, max_tokens=6, sampler=sampler).tokens == [7] * 6
    assert set(shapes) == {(1, 97)}
    assert max(abs(s - 1) for s in sums) < 1e-4


def test_an_own_sampler_is_called_once_for_each_token():
    """One with a memory would go wrong if it were called for refused rows or for the draft."""
    model, draft = tiny_target(), make_draft()
    calls = []

    def sampler(logprobs):
        calls.append(1)
        return mx.argmax(logprobs, axis=-1)

    run = draft_run(model, draft, PROMPT, max_tokens=17, sampler=sampler)
    assert len(calls) == len(run.tokens) == 17


def test_a_nearly_greedy_sampler_keeps_as_many_drafts_as_greedy(monkeypatch):
    model, draft = tiny_target(), make_draft()
    lengths = []
    for temperature in (0.0, 0.01):
        monkeypatch.setattr("mlx_dflash.pair.Drafter", forced_drafter(PROMPT, plain_tokens(model, PROMPT, 30), [5]))
        lengths.append(
            draft_run(model, draft, PROMPT, max_tokens=30, sampler=make_sampler(temperature)).last.stats.accepted
        )
    assert lengths[0] == lengths[1]


def test_shared_dice_keep_more_drafts_than_independent_ones():
    """Target and draft have the same distribution here, so with the same key they must agree nearly always."""
    from mlx_dflash.dice import SHARPNESS, Dice

    probabilities = mx.array(PROBABILITIES.astype(np.float32))
    target_logits = mx.broadcast_to(mx.log(probabilities), (6, 6))
    mx.random.seed(0)
    dice, kept = Dice(make_sampler(1.0)), 0
    dice.begin(mx.array([1]))
    for _ in range(60):
        drafts = dice.guess(target_logits[:5] / SHARPNESS)
        kept += len(dice.roll(target_logits, drafts).tokens) - 1
    assert kept == 300, f"{kept} of 300 drafts were kept"


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_run_that_is_closed_early_leaves_the_random_stream_where_mlx_lm_leaves_it(temperature):
    model, draft = small_pair()
    for taken in range(1, 9):
        states = []
        for runner in (plain_run, lambda model, *a, **k: draft_run(model, draft, *a, **k)):
            run = runner(model, [1, 2, 3], seed=3, take=taken, max_tokens=20, sampler=make_sampler(temperature))
            states.append((run.tokens, run.random_state))
        assert states[0] == states[1], f"closed after {taken} tokens"


def test_draws_of_the_caller_between_tokens_do_not_change_the_text():
    model, draft = small_pair()
    expected = draft_run(model, draft, [1, 2, 3], seed=4, max_tokens=20, sampler=make_sampler(1.0)).tokens
    mx.random.seed(4)
    tokens = []
    for response in mlx_dflash.stream_generate(
        model, tokenizer(), [1, 2, 3], max_tokens=20, draft_model=draft, sampler=make_sampler(1.0)
    ):
        tokens.append(response.token)
        mx.random.uniform()
    assert tokens == expected


def test_two_interleaved_sequences_do_not_share_their_dice():
    model, draft = small_pair()
    sampler = make_sampler(1.0)

    def start(prompt):
        return mlx_dflash.stream_generate(model, tokenizer(), prompt, max_tokens=15, draft_model=draft, sampler=sampler)

    alone = draft_run(model, draft, [1, 2, 3], seed=4, max_tokens=15, sampler=sampler).tokens
    mx.random.seed(4)
    first, second = start([1, 2, 3]), start([4, 4])
    tokens = [next(first).token]
    next(second)
    for response in first:
        tokens.append(response.token)
        next(second, None)
    assert tokens == alone
