"""How many rows a round verifies: both names of it, its limits, and who obeys them."""

import pytest
from support.drafts import draft_config

from mlx_dflash.block_size import chosen_block_size, rows_of
from mlx_dflash.draft.config import DraftConfig


@pytest.mark.parametrize(
    "block_size, num_draft_tokens, chosen",
    [(4, None, 4), (None, 3, 4), (None, 0, 1), ("auto", None, "auto"), (None, None, None)],
)
def test_num_draft_tokens_is_one_less_than_block_size(block_size, num_draft_tokens, chosen):
    assert chosen_block_size(block_size, num_draft_tokens) == chosen


@pytest.mark.parametrize("block_size", [4, "auto"])
def test_two_names_at_once_are_refused_whatever_they_say(block_size):
    with pytest.raises(ValueError, match=f"not both; got block_size {block_size} and num_draft_tokens 3"):
        chosen_block_size(block_size, 3)


@pytest.mark.parametrize("asked", [(4, None), ("auto", None), (None, 0)])
def test_a_block_size_needs_a_draft(asked):
    with pytest.raises(ValueError, match="need a draft"):
        chosen_block_size(*asked, has_draft=False)
    assert chosen_block_size(None, None, has_draft=False) is None


def test_a_text_other_than_auto_is_refused():
    with pytest.raises(ValueError, match="must be a number or \"auto\", got 'fast'"):
        chosen_block_size("fast", None)


@pytest.mark.parametrize("samples_from_anchor, most", [(False, 6), (True, 7)])
def test_the_trained_block_is_the_limit_also_for_a_draft_that_samples_from_the_anchor(samples_from_anchor, most):
    config = draft_config(sample_from_anchor=True) if samples_from_anchor else draft_config()
    num_drafts = DraftConfig.from_dict(config).num_drafts
    assert rows_of(None, num_drafts) == rows_of(most, num_drafts) == most and rows_of(1, num_drafts) == 1
    for wrong in (0, -1, most + 1):
        with pytest.raises(ValueError, match=f"block_size must be 1 to {most}, .* got {wrong}"):
            rows_of(wrong, num_drafts)
