"""What the chat keeps in files: the conversation, its caches, and which pair they belong to."""

import io
import json
import os

import pytest
from support.chat_fixtures import TEMPLATE, save_pair

from mlx_dflash.chat import __main__ as chat
from mlx_dflash.checkpoints import known_pairs


def run(monkeypatch, *flags):
    """Say hello in a chat with these flags."""
    monkeypatch.setattr("sys.argv", ["chat", "-m", "5", *map(str, flags)])
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\n"))
    chat.main()


def test_caches_belong_to_a_draft_whether_it_was_found_by_name_or_given(tmp_path, monkeypatch, capfd):
    target, draft = save_pair(tmp_path)
    monkeypatch.setattr(known_pairs, "PAIRS", [("owner/target", str(draft))])
    flags = ["--model", target, "--prompt-cache-file", tmp_path / "chat.safetensors"]
    run(monkeypatch, *flags)
    run(monkeypatch, *flags, "--draft-model", draft)
    assert "Continuing 2 messages" in capfd.readouterr().out
    with pytest.raises(SystemExit):
        run(monkeypatch, *flags, "--draft-model", "none")
    assert f"was saved with the draft {draft}, this chat has none" in capfd.readouterr().err


def lines_after(monkeypatch, capfd, pair, text, *flags):
    """What a chat shows for these lines of input."""
    monkeypatch.setattr("sys.argv", ["chat", "-m", "5", "--model", str(pair[0]), "--draft-model", str(pair[1]), *flags])
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    chat.main()
    return capfd.readouterr().out.splitlines()


GOOD = {"system": None, "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff\xfe\x00",
        b"[" * 100_000,
        b"[1, 2]",
        b'{"messages": {}}',
        json.dumps(GOOD | {"messages": [{"role": "user", "content": None}]}).encode(),
        json.dumps(GOOD | {"system": 5}).encode(),
    ],
    ids=["empty", "no text", "deep", "list", "no messages", "no content", "no system"],
)
def test_a_bad_file_is_named_and_the_conversation_goes_on(pair, tmp_path, monkeypatch, capfd, content):
    bad, kept = tmp_path / "bad.json", tmp_path / "kept.json"
    bad.write_bytes(content)
    said = lines_after(monkeypatch, capfd, pair, f"hello\n/load {bad}\n/save {kept}\n")
    errors = [line for line in said if line.startswith("error: ")]
    assert len(errors) == 1 and str(bad) in errors[0]
    assert json.loads(kept.read_text())["messages"][0] == {"role": "user", "content": "hello"}


def damaged(file, change):
    """Change the record in a saved cache by change(record), in place."""
    import mlx.core as mx

    arrays, metadata = mx.load(str(file), return_metadata=True)
    key = next(name for name, value in metadata.items() if value.startswith('{"system"'))
    metadata[key] = change(json.loads(metadata[key]))
    mx.save_safetensors(str(file), arrays, metadata)


@pytest.mark.parametrize(
    "change",
    [
        lambda record: "{",
        lambda record: json.dumps([record]),
        lambda record: json.dumps({k: v for k, v in record.items() if k != "pieces"}),
        lambda record: json.dumps(record | {"pieces": [["a", "b"]]}),
        lambda record: json.dumps(record | {"pieces": [["a", [-1]]]}),
        lambda record: json.dumps(record | {"pieces": record["pieces"][:1]}),
    ],
    ids=["no JSON", "list", "no pieces", "no tokens", "no ids", "other length"],
)
def test_caches_with_a_damaged_record_are_named_and_the_conversation_goes_on(
    pair, tmp_path, monkeypatch, capfd, change
):
    bad, kept = tmp_path / "bad.safetensors", tmp_path / "kept.json"
    lines_after(monkeypatch, capfd, pair, f"hello\nmore\n/save {bad}\n")
    damaged(bad, change)
    said = lines_after(monkeypatch, capfd, pair, f"other\n/load {bad}\n/save {kept}\n")
    errors = [line for line in said if line.startswith("error: ")]
    assert len(errors) == 1 and str(bad) in errors[0]
    assert json.loads(kept.read_text())["messages"][0]["content"] == "other"


@pytest.mark.parametrize("name", ["missing/talk.json", "missing/talk.safetensors", "", "folder.json"])
def test_a_failed_save_names_the_file_and_the_chat_goes_on(pair, tmp_path, monkeypatch, capfd, name):
    (tmp_path / "folder.json").mkdir()
    file, kept = tmp_path / name, tmp_path / "kept.json"
    said = lines_after(monkeypatch, capfd, pair, f"hello\n/save {file}\n/save {kept}\n")
    errors = [line for line in said if line.startswith("error: ")]
    assert len(errors) == 1 and str(file) in errors[0] and ".part" not in errors[0]
    assert len(json.loads(kept.read_text())["messages"]) == 2
    assert sorted(os.listdir(tmp_path)) == ["folder.json", "kept.json"]


def test_what_is_no_unicode_is_saved_and_loaded(pair, tmp_path, monkeypatch, capfd):
    file = tmp_path / "talk.json"
    lines_after(monkeypatch, capfd, pair, f"/system \udce9 é\nhello\n/save {file}\n")
    assert json.loads(file.read_text(encoding="utf-8"))["system"] == "\udce9 é"


def test_a_file_that_cannot_be_written_is_told_before_the_chat(pair, tmp_path, monkeypatch, capfd):
    with pytest.raises(SystemExit, match="2"):
        lines_after(monkeypatch, capfd, pair, "hello\n", "--prompt-cache-file", str(tmp_path / "no" / "x.safetensors"))
    out, err = capfd.readouterr()
    assert "there is no folder" in err and err.count("\n") == 1 and not out


TEMPLATES = {
    "raise_exception('roles must alternate')": "roles must alternate",
    "messages[5].content": "",
    "1 // 0": "",
    "'a' + none": "",
    "messages | nonsense": "nonsense",
}


@pytest.mark.parametrize("expression", TEMPLATES)
def test_a_template_that_raises_is_one_line_and_the_chat_goes_on(tmp_path, monkeypatch, capfd, expression):
    fails = "{% if messages[-1].content == 'bad' %}{{ EXPRESSION }}{% endif %}".replace("EXPRESSION", expression)
    if "nonsense" in expression:
        fails = "{{ " + expression + " }}"  # an unknown filter fails for every message
    pair, kept = save_pair(tmp_path, fails + TEMPLATE), tmp_path / "kept.json"
    said = lines_after(monkeypatch, capfd, pair, f"hello\nbad\nagain\n/save {kept}\n")
    errors = [line for line in said if line.startswith("error: ")]
    assert len(errors) == (3 if "nonsense" in expression else 1)
    assert "chat template" in errors[0] and TEMPLATES[expression] in errors[0]
    asked = [m["content"] for m in json.loads(kept.read_text())["messages"] if m["role"] == "user"]
    assert asked == ([] if "nonsense" in expression else ["hello", "again"])
