"""What the chat keeps in files: the conversation, its caches, and which pair they belong to."""

import io

import pytest
from support.chat_fixtures import save_pair

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
