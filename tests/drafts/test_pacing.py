"""How many drafts a round verifies, on made-up machines, and that the text does not depend on it."""

import random

import mlx_lm
import pytest
from support.byte_tokenizer import byte_tokenizer
from support.drafts import draft_config, draft_weights
from support.folders import save_draft
from support.targets import tiny_target

import mlx_dflash
from mlx_dflash.pace import Pace, ReadingPace
from mlx_dflash.pair import Pair


def run(pace, seconds, share, num_tokens=600, seed=0):
    """Seconds of a text whose drafts are kept with probability share each, on a machine of seconds(num_drafts)."""
    random_ = random.Random(seed)
    spent, tokens, choices = 0.0, 0, []
    while tokens < num_tokens:
        k = pace.num_drafts
        kept = 0
        while kept < k and random_.random() < share:
            kept += 1
        pace.learn(k, kept, seconds(k))
        spent, tokens = spent + seconds(k), tokens + kept + 1
        choices.append(k)
    return spent / tokens, choices


def flat(k):
    """A pass costs the same for any rows; the draft a quarter of it."""
    return 1.0 + 0.25 * (k > 0)


def steep(k):
    """Every row costs half a pass."""
    return 1.0 + 0.5 * k


def test_flat_costs_and_good_drafts_give_the_longest_block():
    per_token, choices = run(Pace(15), flat, share=0.95)
    assert choices[-40:].count(15) > 30, choices
    assert per_token < 0.2


def test_a_useless_draft_costs_little_in_the_end():
    pace = Pace(15)
    run(pace, flat, share=0.0)
    per_token, choices = run(pace, flat, share=0.0)
    assert choices.count(0) > 0.97 * len(choices)
    assert per_token < 1.01


def test_steep_costs_give_a_short_block():
    _, choices = run(Pace(15), steep, share=0.7)
    assert 0 < sum(choices[-100:]) / 100 < 2.5, choices[-100:]


def test_three_rows_are_a_choice():
    """As on a CPU that multiplies three rows for little more than one."""
    _, choices = run(Pace(7), lambda k: (1.0, 1.15, 1.2, 1.5)[min(k, 3)], share=0.5, num_tokens=1500)
    assert choices[-200:].count(2) > 150, choices[-200:]
    assert Pace(1).choices == [1, 0] and Pace(2).choices == [2, 1, 0]


def test_a_text_that_becomes_predictable_gets_drafts_again():
    pace = Pace(7)
    run(pace, flat, share=0.0)
    _, choices = run(pace, flat, share=0.9, num_tokens=1500)
    assert choices[-40:].count(7) > 30, choices


def test_costs_are_handed_on():
    costs = {}
    run(Pace(7, costs), flat, share=0.9)
    assert costs.keys() == {0, 1, 2, 3, 7} and costs[7] == pytest.approx(1.25) and costs[0] == pytest.approx(1.0)
    assert Pace(7, costs).num_drafts in costs
    _, choices = run(Pace(7, costs), flat, share=0.9, num_tokens=60)
    assert 0 not in choices


def test_one_held_up_round_changes_little():
    costs = {0: 1.0, 1: 1.25, 2: 1.25, 3: 1.25, 7: 1.25}
    Pace(7, costs).learn(7, 3, seconds=100.0)
    assert costs[7] <= 1.25 * 1.2


def test_a_block_of_one_drafts_nothing():
    assert run(Pace(0), flat, share=0.5)[1] == [0] * 600


def test_auto_gives_the_same_text(tmp_path):
    model = tiny_target(vocab_size=258)
    config = draft_config(vocab_size=258, dflash={"mask_token_id": 255})
    save_draft(tmp_path / "draft", config, draft_weights(config))
    draft = mlx_dflash.load_draft(str(tmp_path / "draft"))
    options = dict(tokenizer=byte_tokenizer(), prompt=[1, 2, 3, 4], max_tokens=120)
    plain = [r.token for r in mlx_lm.stream_generate(model, **options)]
    ours = list(mlx_dflash.stream_generate(model, draft_model=draft, block_size="auto", **options))
    assert [r.token for r in ours] == plain
    assert Pair(model, draft).round_seconds.keys() >= {0, 1, 3}
    assert ours[-1].stats.num_drafted < 0.9 * ours[-1].stats.num_rounds * (draft.config.block_size - 1)


def test_other_words_are_refused():
    with pytest.raises(ValueError, match="a number or \"auto\", got 'fast'"):
        list(mlx_dflash.stream_generate(tiny_target(), byte_tokenizer(), [1], draft_model=_draft(), block_size="fast"))


def _draft():
    from mlx_dflash.draft.config import DraftConfig
    from mlx_dflash.draft.model import DraftModel

    return DraftModel(DraftConfig.from_dict(draft_config()))


@pytest.mark.parametrize("token_seconds", [0.002, 0.03, 0.4])
def test_a_step_of_reading_takes_about_a_second_on_any_machine(token_seconds):
    pace, steps = ReadingPace(first=64), []
    for _ in range(12):
        steps.append(pace.step(2048))
        pace.learn(steps[-1], 0.1 + token_seconds * steps[-1])
    assert steps[0] == 64
    taken = 0.1 + token_seconds * steps[-1]
    assert 0.5 <= taken <= 1.1 or steps[-1] in (8, 2048), f"a step of {steps[-1]} tokens takes {taken} s"


def test_a_fast_machine_reads_in_the_steps_that_were_asked_for():
    pace = ReadingPace()
    for tokens in (2048, 2048, 300, 2048):
        assert pace.step(tokens) == tokens
        pace.learn(tokens, tokens * 1e-4)


def test_a_short_rest_of_a_prompt_says_nothing_of_a_long_step():
    pace = ReadingPace(first=64)
    pace.learn(64, 0.1)
    before = pace.step(2048)
    pace.learn(3, 0.05)
    assert pace.step(2048) == before == 640
