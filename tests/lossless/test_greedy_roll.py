"""Greedy rolls are those of plain generation, also where rounding decides."""

import mlx.core as mx
import numpy as np
import pytest

from mlx_dflash.dice import Dice

ROWS, VOCAB_SIZE = 8, 997


def near_ties(seed, dtype):
    """Logits (8, V) whose two greatest are neighbouring float32 numbers, in a magnitude that the seed chooses."""
    random = np.random.RandomState(seed)
    logits = (random.standard_normal((ROWS, VOCAB_SIZE)) * 10.0 ** random.randint(-3, 3)).astype(np.float32)
    for row in logits:
        top, other = random.choice(VOCAB_SIZE, 2, replace=False)
        row[top] = row.max() * 1.001 + 1e-3
        row[other] = np.nextafter(row[top], np.float32(-np.inf))
    return mx.array(logits).astype(dtype)


def mlx_lm_tokens(logits):
    rows = (logits[i : i + 1] for i in range(len(logits)))
    return [mx.argmax(row - mx.logsumexp(row, keepdims=True), axis=-1).item() for row in rows]


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16])
def test_near_ties_fall_as_for_mlx_lm(dtype):
    dice, no_drafts = Dice(), mx.zeros((ROWS - 1,), mx.uint32)
    argmax_is_wrong = 0
    for seed in range(40):
        logits = near_ties(seed, dtype)
        expected = mlx_lm_tokens(logits)
        argmax_is_wrong += mx.argmax(logits, axis=-1).tolist() != expected
        assert dice.roll(logits, no_drafts).tokens == expected, f"seed {seed}"
    assert argmax_is_wrong > 5, "these logits decide nothing"


def test_logprobs_are_mlx_lms():
    logits = mx.random.normal((3, VOCAB_SIZE), key=mx.random.key(1))
    roll = Dice().roll(logits, mx.zeros((2,), mx.uint32))
    assert roll.tokens == mlx_lm_tokens(logits)
    for row, logprobs in zip(logits, roll.logprobs, strict=True):
        assert mx.array_equal(logprobs, row - mx.logsumexp(row[None], keepdims=True)[0])


def test_a_row_without_numbers_is_rolled_as_by_mlx_lm():
    logits = mx.full((2, VOCAB_SIZE), float("nan"))
    assert Dice().roll(logits, mx.zeros((1,), mx.uint32)).tokens == mlx_lm_tokens(logits)
