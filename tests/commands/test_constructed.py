"""Constructed pairs: exact text, drafts that are right as often as asked, through the public API."""

import mlx_lm
import pytest

import mlx_dflash
from mlx_dflash.benchmark.constructed import SHAPES, ConstructedPair, expected_acceptance_length

PAIR = ConstructedPair(SHAPES["tiny"])


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    target, draft = PAIR.save(tmp_path_factory.mktemp("pair"))
    return *mlx_dflash.load(str(target)), mlx_dflash.load_draft(str(draft))


@pytest.mark.parametrize("rate, length", [(0.0, None), (0.7, None), (0.7, 200), (1.0, None)])
def test_text_is_the_targets_and_drafts_are_right_at_the_rate(loaded, rate, length):
    model, tokenizer, draft = loaded
    num_rounds = num_tokens = 0
    for seed in range(4):
        prompt = PAIR.prompt(rate, length, seed)
        options = dict(prompt=prompt, max_tokens=49)
        plain = [r.token for r in mlx_lm.stream_generate(model, tokenizer, **options)]
        ours = list(mlx_dflash.stream_generate(model, tokenizer, draft_model=draft, **options))
        assert [r.token for r in ours] == plain, f"prompt {seed}"
        num_rounds += ours[-1].stats.num_rounds
        num_tokens += len(ours) - 1
    expected = expected_acceptance_length(rate, PAIR.shape.block_size)
    assert 0.75 * expected <= num_tokens / num_rounds <= 1.33 * expected, (
        f"{num_tokens} tokens in {num_rounds} rounds, expected {expected:.2f}"
    )


def test_text_is_the_ring(loaded):
    model, tokenizer, _ = loaded
    prompt = PAIR.prompt(0.5)
    token = prompt[-1]
    for response in mlx_lm.stream_generate(model, tokenizer, prompt, max_tokens=9):
        token = PAIR.next[token]
        assert response.token == token, f"token {response.generation_tokens}"
    assert response.text == f" {token}"


def test_bad_requests_are_refused():
    with pytest.raises(ValueError, match="0 to 1, got 1.5"):
        PAIR.prompt(1.5)
    with pytest.raises(ValueError, match="at least 76 tokens, got 75"):
        PAIR.prompt(0.5, 75)


def test_expected_acceptance_length():
    assert expected_acceptance_length(1.0, 16) == 16
    assert expected_acceptance_length(0.0, 16) == 1
    assert expected_acceptance_length(0.5, 3) == 1.75
