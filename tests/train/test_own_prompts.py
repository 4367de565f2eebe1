"""Prompts that the target writes itself: which turns count, what is kept, the whole step with the demo target."""

import itertools
import json

import pytest
from support.byte_tokenizer import CHAT_TEMPLATE, EOS_ID, byte_tokenizer

from mlx_dflash.train import step_data
from mlx_dflash.train.__main__ import main
from mlx_dflash.train.text.corpus import Sample, read_corpus
from mlx_dflash.train.text.own_prompts import OwnPrompts


def target_that_says(*turns):
    """Answers of a target that speaks these turns in order, and what it was asked. A tuple's turn has an end."""
    asked, turns = [], iter(turns)

    def answers(todo, style):
        assert style.sampled_share == 1.0 and style.temperature > 0
        for source, prompt in todo:
            turn = next(turns)
            asked.append((source, bytes(prompt.ids).decode()))
            said = [*turn.encode()] if isinstance(turn, str) else [*turn[0].encode(), EOS_ID]
            yield Sample(prompt.ids + said, len(prompt.ids), source)

    return answers, asked


def write(path, count, *turns, template=CHAT_TEMPLATE):
    answers, asked = target_that_says(*turns)
    counts = list(OwnPrompts(byte_tokenizer(bos=True, chat_template=template)).write(path, count, answers, 0))
    return [json.loads(line)["prompt"] for line in path.read_text().split("\n")[:-1]], counts, asked


def test_the_target_speaks_where_a_user_would(tmp_path):
    prompts, counts, asked = write(tmp_path / "p.jsonl", 1, " What is\na byte?\nassistant: Eight bits.")
    assert prompts == ["What is\na byte?"] and counts == [0, 1]
    assert asked == [(0, "user:")], "the conversation up to the user's words, whose space is their own"


def test_turns_that_do_not_end_and_repeated_ones_do_not_count(tmp_path):
    turns = "cut off in the", ("once",), (" once\n",), ("",), "assistant: nothing said", ("é",), ("never asked",)
    prompts, counts, asked = write(tmp_path / "p.jsonl", 2, *turns)
    assert prompts == ["once", "é"] and counts == [0, 1, 2] and len(asked) == 6


def test_a_turn_ends_with_the_token_that_ends_it_and_holds_no_other(tmp_path):
    template = "{% for m in messages %}<user>{{ m['content'] }}<eos><assistant>{% endfor %}"
    turns = "What?<eos><assistant>That.", ("<bos>Who?",), ("Why?",)
    assert write(tmp_path / "p.jsonl", 2, *turns, template=template)[0] == ["What?", "Why?"]


def test_a_file_that_was_cut_off_is_continued(tmp_path):
    path = tmp_path / "p.jsonl"
    write(path, 2, ("one\u2028still one",), ("two",))
    path.write_text(path.read_text() + '{"prompt": "thr')
    prompts, counts, asked = write(path, 3, ("two",), ("four",))
    assert prompts == ["one\u2028still one", "two", "four"] and counts == [2, 3] and asked[0][0] == 2
    assert write(path, 2)[0] == prompts, "nothing is asked when enough is there"


def test_lines_of_ones_own_are_kept(tmp_path):
    (tmp_path / "p.jsonl").write_text('\n{"prompt": "mine", "class": "x"}')
    answers, _ = target_that_says(("one",))
    assert list(OwnPrompts(byte_tokenizer(chat_template=CHAT_TEMPLATE)).write(tmp_path / "p.jsonl", 2, answers, 0)) == [
        1,
        2,
    ]
    assert (tmp_path / "p.jsonl").read_text() == '\n{"prompt": "mine", "class": "x"}\n{"prompt": "one"}\n'


@pytest.mark.parametrize(
    "content",
    [b'{"prompt": "a"}\nplain text\n', b'{"prompt": "a"}\nplain text', b'{"prompt": "a"}\n{"prompt": "\xff"}\n'],
)
def test_a_file_of_something_else_is_named_and_left(tmp_path, content):
    path = tmp_path / "p.jsonl"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="p.jsonl, line 2"):
        write(path, 3, ("one",), ("two",))
    assert path.read_bytes() == content


def test_a_target_that_repeats_itself_ends_in_an_error(tmp_path):
    with pytest.raises(ValueError, match="51 times in a row the target said nothing new"):
        write(tmp_path / "p.jsonl", 2, *[("again",)] * 99)
    turns = itertools.chain.from_iterable((*["cut off"] * 50, (f"new {i}",)) for i in range(3))
    assert write(tmp_path / "q.jsonl", 3, *turns)[0] == ["new 0", "new 1", "new 2"]


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "no chat template"),
        ("{{ messages[0]['content'] }}!", "does not show where"),
        ("user: {{ messages[0]['content'] }}", "does not show where"),
        ("{{ raise_exception('no user') }}", "the chat template of this tokenizer cannot render the messages: no user"),
    ],
)
def test_templates_without_a_place_for_the_user_are_refused(template, message):
    with pytest.raises(ValueError, match=message):
        OwnPrompts(byte_tokenizer(chat_template=template))


def data(out, *flags):
    main(["data", "--model", "demo", "--out", str(out), "--max-tokens", "4", "--batch-size", "4", *flags])


@pytest.mark.demo
def test_the_demo_target_asks_itself_and_answers(tmp_path):
    out, file = tmp_path / "data-0.1.jsonl", tmp_path / "data-0.1.prompts.jsonl"
    data(out, "--own-prompts", "2")
    prompts = file.read_text()
    data(out, "--own-prompts", "3")
    more = file.read_text()
    assert len(prompts.splitlines()) == 2 and len(more.splitlines()) == 3 and more.startswith(prompts)
    assert "<|im" not in more
    assert sorted(sample.source for sample in read_corpus(out)) == [0, 1, 2]
    data(out, "--own-prompts", "2")
    assert len(list(read_corpus(out))) == 3, "answers that are there stay"
    data(tmp_path / "again.jsonl", "--own-prompts", "2")
    assert (tmp_path / "again.prompts.jsonl").read_text() == prompts, "the same seed"


@pytest.mark.demo
def test_a_file_of_other_answers_is_refused_before_prompts_are_written(tmp_path, capsys):
    (tmp_path / "prompts.txt").write_text("hello\n")
    data(tmp_path / "data.jsonl", "--prompts", str(tmp_path / "prompts.txt"))
    with pytest.raises(SystemExit) as ended:
        data(tmp_path / "data.jsonl", "--own-prompts", "2")
    assert ended.value.code == 2 and "was begun with from" in capsys.readouterr().err
    assert not (tmp_path / "data.prompts.jsonl").exists()


@pytest.mark.demo
def test_interrupted_prompts_end_with_the_status_of_ctrl_c_and_are_continued(tmp_path, monkeypatch, capsys):
    def interrupted(*arguments):
        yield from itertools.islice(batched(*arguments), 1)
        raise KeyboardInterrupt

    batched = step_data.batched_answers
    monkeypatch.setattr(step_data, "batched_answers", interrupted)
    with pytest.raises(SystemExit) as ended:
        data(tmp_path / "data.jsonl", "--own-prompts", "2")
    assert ended.value.code == 130 and "the same command goes on" in capsys.readouterr().err
    monkeypatch.setattr(step_data, "batched_answers", batched)
    data(tmp_path / "data.jsonl", "--own-prompts", "2")
    assert len(list(read_corpus(tmp_path / "data.jsonl"))) == 2
