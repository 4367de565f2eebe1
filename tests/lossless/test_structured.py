"""Grammars as logits processors: the text keeps to them, the same with a draft as without."""

import json

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.sample_utils import make_sampler
from support.byte_tokenizer import byte_tokenizer
from support.chat_fixtures import EOS_ID, SIZES, chat_draft, chat_target, save_pair

from mlx_dflash.api import generate
from mlx_dflash.checkpoints.drafts import load_draft
from mlx_dflash.grammars import Grammars


@pytest.fixture(scope="module")
def target():
    return chat_target()[0]


@pytest.fixture(scope="module")
def draft(target, tmp_path_factory):
    return load_draft(str(chat_draft(tmp_path_factory.mktemp("draft"), target)))


@pytest.fixture(scope="module")
def tokenizer():
    return byte_tokenizer()


@pytest.fixture(scope="module")
def grammars(tokenizer):
    return Grammars(tokenizer, SIZES["vocab_size"])


def write(target, tokenizer, draft, processor, seed=0, temp=1.0, max_tokens=200):
    mx.random.seed(seed)
    return generate(
        target,
        tokenizer,
        "write: ",
        max_tokens=max_tokens,
        draft_model=draft,
        sampler=make_sampler(temp),
        logits_processors=[processor],
    )


@settings(max_examples=8, deadline=None)
@given(
    seed=st.integers(0, 1000), temp=st.sampled_from([0.0, 0.5, 1.0]), kind=st.sampled_from(["schema", "regex", "lark"])
)
def test_text_keeps_to_the_grammar_and_drafting_changes_nothing(target, tokenizer, draft, grammars, seed, temp, kind):
    schema = {"type": "array", "items": {"enum": [6, 66, True, "6[6"]}, "minItems": 2, "maxItems": 4}
    make = {
        "schema": lambda: grammars.json_schema(schema),
        "regex": lambda: grammars.regex(r"[6\[}]{3,9}end"),
        "lark": lambda: grammars.lark('start: "6" start | "."'),
    }[kind]
    drafted = write(target, tokenizer, draft, make(), seed, temp, 60)
    plain = write(target, tokenizer, None, make(), seed, temp, 60)
    assert drafted == plain
    if kind == "schema":
        assert 2 <= len(json.loads(drafted)) <= 4
    elif kind == "regex":
        assert drafted.endswith("end") and set(drafted[:-3]) <= set("6[}") and 3 <= len(drafted) - 3 <= 9
    else:
        assert set(drafted[:-1]) <= {"6"} and (drafted.endswith(".") or len(drafted) == 60)


def test_only_the_end_may_follow_a_complete_text(grammars):
    processor = grammars.regex("ab")
    logits, tokens = mx.zeros((1, SIZES["vocab_size"])), [1, 2]
    for letter, expected in [("a", [ord("a")]), ("b", [ord("b")]), (None, [EOS_ID])]:
        allowed = [i for i, value in enumerate(processor(mx.array(tokens), logits)[0].tolist()) if value == 0]
        assert allowed == expected
        tokens = [*tokens, ord(letter)] if letter else tokens


def test_grammar_waits_for_the_end_of_the_reasoning(grammars):
    processor = grammars.regex("ab", after=(9, 8))
    logits, tokens = mx.zeros((1, SIZES["vocab_size"])), [9, 8]
    for token in (5, 9, 9):
        assert mx.array_equal(processor(mx.array(tokens), logits), logits), "the prompt and the reasoning are free"
        tokens.append(token)
    processor(mx.array(tokens), logits)
    tokens.append(8)
    assert processor(mx.array(tokens), logits)[0].tolist().count(0) == 1


@pytest.mark.parametrize(
    "kind, text", [("regex", "("), ("lark", "start: ("), ("json_schema", '{"type": "nonsense"}'), ("json_schema", "{")]
)
def test_wrong_grammars_are_refused(grammars, kind, text):
    with pytest.raises(ValueError):
        getattr(grammars, kind)(text)


def test_schema_on_the_command_line(tmp_path, monkeypatch, capsys):
    from mlx_dflash.generate import main

    target, draft = save_pair(tmp_path)
    (tmp_path / "schema.json").write_text('{"type": "array", "items": {"enum": [6, 66]}, "minItems": 2, "maxItems": 3}')
    for schema in (tmp_path / "schema.json", (tmp_path / "schema.json").read_text()):
        flags = [
            "--model",
            target,
            "--draft-model",
            draft,
            "-p",
            "hi",
            "--temp",
            "1",
            "--compare",
            "--json-schema",
            schema,
        ]
        monkeypatch.setattr("sys.argv", ["generate", *map(str, flags)])
        main()
        out, err = capsys.readouterr()
        assert set(json.loads(out)) <= {6, 66} and "the same tokens" in err
