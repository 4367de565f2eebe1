"""The chat's conversation: what it reads, where its caches stand, what it says, however it is led."""

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.byte_tokenizer import byte_tokenizer
from support.chat_fixtures import TEMPLATE, THINKING_TEMPLATE, chat_draft, chat_target
from support.targets import plain_tokens

from mlx_dflash.api import open_session
from mlx_dflash.caches.saved import make_prompt_cache
from mlx_dflash.chat import files
from mlx_dflash.chat.conversation import Conversation
from mlx_dflash.chat.settings import Settings
from mlx_dflash.checkpoints.drafts import load_draft
from mlx_dflash.emission import emit
from mlx_dflash.pair import Pair


def make(target, draft, template=TEMPLATE, max_tokens=20, **options):
    chosen = Settings(max_tokens=max_tokens)
    return Conversation(target, byte_tokenizer(chat_template=template), draft, settings=chosen, **options)


def say(conversation, text, **options):
    return "".join(piece for _, piece in conversation.ask(text, **options))


def rendered(conversation):
    """The template's text of all messages and the beginning of another answer."""
    system = [{"role": "system", "content": conversation.system}] if conversation.system else []
    messages = system + conversation.messages
    return conversation.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)


def assert_caches_equal_fresh(conversation):
    """The caches hold, to rounding, what one fresh read of the same tokens gives."""
    covered = conversation.covered
    fresh = make_prompt_cache(conversation.model, conversation.draft)
    session = open_session(Pair(conversation.model, conversation.draft), mx.array(covered), 1, prompt_cache=fresh)
    list(emit(session, mx.array(covered)))
    for i, (kept, new) in enumerate(zip(conversation.caches, fresh)):
        assert kept.offset == len(covered), (
            f"cache {i} covers {kept.offset} tokens, the conversation has {len(covered)}"
        )
        for a, b in zip(kept.state[:2], new.state[:2]):
            rows = min(a.shape[2], b.shape[2] - 1)
            worst = mx.abs(a[..., -rows:, :] - b[..., -rows - 1 : -1, :]).max().item()
            assert worst < 1e-4, f"cache {i} differs by {worst} over {rows} rows"


def assert_answer_is_plain(conversation, prompt_length):
    """The last answer is mlx-lm's own greedy one to the same tokens."""
    covered = conversation.covered
    expected = plain_tokens(conversation.model, covered[:prompt_length], len(covered) - prompt_length)
    assert covered[prompt_length:] == expected


def test_second_turn_reads_only_the_new_tokens(target, draft):
    conversation = make(target, draft)
    say(conversation, "hello")
    covered, read = len(conversation.covered), []
    say(conversation, "and you?", progress=lambda done, total: read.append(total))
    answer_open = conversation.messages[1]["content"] and conversation.turn.num_cached == covered
    new_text = len("user: and you?") + 1 + len("assistant: ")
    assert answer_open and conversation.turn.num_cached == covered
    assert conversation.turn.num_read in (new_text, new_text + 1), (
        "the new message, and the end of the turn if max_tokens cut it"
    )
    assert set(read) == {conversation.turn.num_read}
    assert conversation.turn.response.stats.num_accepted > 0, "the rounds of this test are to keep drafts"
    assert_caches_equal_fresh(conversation)
    assert_answer_is_plain(conversation, conversation.turn.num_cached + conversation.turn.num_read)


@pytest.mark.parametrize("family", ["llama_sliding", "gemma3_text"])
def test_undo_past_a_sliding_window_reads_again_and_says_so(family, tmp_path):
    target = chat_target(family)[0]
    conversation = make(target, load_draft(str(chat_draft(tmp_path, target))), max_tokens=60)
    say(conversation, "tell me something about windows")
    say(conversation, "go on")
    conversation.undo()
    say(conversation, "something else then")
    assert any("cannot go back" in notice for notice in conversation.turn.notices)
    assert conversation.turn.num_cached == 0
    assert_caches_equal_fresh(conversation)


def test_dropped_reasoning_goes_back_to_the_common_beginning(target, draft):
    # The model says random letters; the first that differs from its first stands for the end of the reasoning.
    said = plain_tokens(target, byte_tokenizer().encode("user: hi<eos>assistant: <think>"), 20)
    at = next(i for i, token in enumerate(said) if token != said[0])
    end = chr(said[at])
    conversation = make(target, draft, THINKING_TEMPLATE.replace("</think>", end))
    conversation.tokenizer._think_start, conversation.tokenizer._think_end = "<think>", end
    kinds = [kind for kind, _ in conversation.ask("hi")]
    assert kinds == ["reasoning"] * at + ["normal"] * (len(kinds) - at) and kinds[-1] == "normal"
    say(conversation, "more")
    kept = byte_tokenizer().decode(conversation.covered[: conversation.turn.num_cached])
    assert kept == "user: hi<eos>assistant: " and not conversation.turn.notices
    assert "<think>" not in rendered(conversation)[: -len("<think>")]
    assert_caches_equal_fresh(conversation)
    assert_answer_is_plain(conversation, conversation.turn.num_cached + conversation.turn.num_read)


def test_stopping_an_answer_keeps_what_was_said(target, draft):
    conversation = make(target, draft, max_tokens=-1)
    heard = []
    for _, piece in conversation.ask("hello", should_stop=lambda: len("".join(heard)) >= 5):
        heard.append(piece)
    text = "".join(heard)
    assert conversation.messages[-1] == {"role": "assistant", "content": text} and 5 <= len(text) <= 7
    assert_caches_equal_fresh(conversation)
    say(conversation, "go on", should_stop=lambda: len(conversation.turn.tokens) > 10)
    assert conversation.turn.num_cached > 5 and not conversation.turn.notices
    assert_caches_equal_fresh(conversation)


def test_stopping_the_reading_unsends_the_message(target, draft):
    conversation = make(target, draft, prefill_step_size=8)
    say(conversation, "hello")
    messages, covered = list(conversation.messages), conversation.covered
    calls = []
    assert say(conversation, "x" * 100, should_stop=lambda: calls.append(0) or len(calls) > 4) == ""
    assert conversation.messages == messages and "not sent" in conversation.turn.notices[0]
    assert conversation.covered == covered
    say(conversation, "again")
    assert conversation.turn.num_cached == len(covered)
    assert_caches_equal_fresh(conversation)


def test_closing_the_answer_early_keeps_what_was_said(target, draft):
    conversation = make(target, draft, max_tokens=50)
    answer = conversation.ask("hello")
    pieces = [next(answer)[1] for _ in range(3)]
    answer.close()
    assert conversation.messages[-1]["content"] == "".join(pieces)
    assert_caches_equal_fresh(conversation)


def test_failure_in_an_answer_unsends_the_message_and_the_chat_goes_on(target, draft):
    conversation = make(target, draft)
    say(conversation, "hello")
    messages = list(conversation.messages)
    conversation.settings.max_tokens = 0
    with pytest.raises(ValueError):
        say(conversation, "and?")
    assert conversation.messages == messages
    conversation.settings.max_tokens = 20
    say(conversation, "and?")
    assert_caches_equal_fresh(conversation)


@pytest.mark.parametrize("has_draft", [True, False])
def test_a_full_context_is_refused_until_the_oldest_turn_is_dropped(draft, has_draft):
    target = chat_target()[0]
    target.args.max_position_embeddings = 110
    conversation = make(target, draft if has_draft else None, max_tokens=-1)
    say(conversation, "x" * 40, should_stop=lambda: len(conversation.turn.tokens) > 5)
    say(conversation, "hello")
    assert len(conversation.covered) <= 110, "the answer ends where the context does"
    messages = list(conversation.messages)
    with pytest.raises(ValueError, match="the model's context has 110"):
        say(conversation, "y" * 30)
    assert conversation.messages == messages
    assert [conversation.drop(), conversation.drop()] == ["x" * 40, "hello"]
    conversation.settings.max_tokens = 3
    assert say(conversation, "y" * 30) and len(conversation.covered) <= 110
    with pytest.raises(ValueError, match="nothing to forget"):
        conversation.drop(), conversation.drop()


def test_answers_without_a_draft_are_the_same(target, draft):
    with_draft, plain = make(target, draft, max_tokens=40), make(target, None, max_tokens=40)
    for text in ("hello", "who are you?", "why?"):
        assert say(with_draft, text) == say(plain, text)
    assert plain.covered == with_draft.covered
    with_draft.use_draft(False)
    assert say(with_draft, "now?") == say(plain, "now?") and with_draft.turn.num_cached == 0
    with_draft.undo(), plain.undo()
    assert say(with_draft, "then?") == say(plain, "then?") and with_draft.turn.num_cached == plain.turn.num_cached > 0


@pytest.mark.parametrize("name", ["chat.safetensors", "chat.json"])
def test_saved_conversation_goes_on(target, draft, name, tmp_path):
    file_name = str(tmp_path / name)
    conversation = make(target, draft)
    say(conversation, "hello")
    files.save(conversation, file_name, {"model": "tiny"})
    resumed = make(target, draft)
    has_caches = files.load(resumed, file_name, {"model": "tiny"})
    assert has_caches == name.endswith("safetensors") and resumed.messages == conversation.messages
    assert say(resumed, "and?") == say(conversation, "and?")
    assert resumed.turn.num_cached == (conversation.turn.num_cached if has_caches else 0)
    assert_caches_equal_fresh(resumed)


def test_files_of_others_are_refused(target, draft, tmp_path):
    conversation = make(target, draft)
    say(conversation, "hello")
    file_name = str(tmp_path / "chat.safetensors")
    files.save(conversation, file_name, {"model": "tiny"})
    with pytest.raises(ValueError, match="model tiny, this chat has other"):
        files.load(make(target, draft), file_name, {"model": "other"})
    (tmp_path / "list.json").write_text("[1, 2]")
    with pytest.raises(ValueError, match="list.json must hold a JSON object, got list"):
        files.load(conversation, str(tmp_path / "list.json"), {})
    from mlx_dflash import save_prompt_cache

    save_prompt_cache(file_name, conversation.caches, {})
    with pytest.raises(ValueError, match="no record of a conversation"):
        files.load(conversation, file_name, {})


def test_settings_refuse_what_makes_no_sense():
    chosen = Settings()
    for name, value in [
        ("temp", "hot"),
        ("temp", -1),
        ("top_p", 2),
        ("max_tokens", 0),
        ("max_tokens", 1.5j),
        ("thinking", "maybe"),
        ("colour", 1),
    ]:
        with pytest.raises(ValueError, match=name):
            chosen.set(name, value)
    chosen.set("temp", "0.7")
    chosen.set("thinking", "off")
    assert chosen == Settings(temp=0.7, thinking=False)


ACTIONS = st.lists(
    st.one_of(
        st.tuples(
            st.just("ask"),
            st.text(
                st.characters(min_codepoint=32, max_codepoint=0x2FFF, exclude_categories=["Cs"]),
                min_size=1,
                max_size=12,
            ),
        ),
        st.tuples(st.just("undo"), st.none()),
        st.tuples(st.just("retry"), st.none()),
        st.tuples(st.just("stop"), st.integers(1, 12)),
        st.tuples(st.just("draft"), st.booleans()),
        st.tuples(st.just("system"), st.sampled_from([None, "be short"])),
    ),
    min_size=2,
    max_size=8,
)


@settings(max_examples=15, deadline=None)
@given(actions=ACTIONS)
def test_any_conversation_leaves_caches_at_its_text(target, draft, actions):
    conversation = make(target, draft, max_tokens=12)
    for action, value in [*actions, ("draft", True), ("ask", "end")]:
        if action == "undo" and conversation.messages:
            conversation.undo()
        elif action == "draft":
            conversation.use_draft(value)
        elif action == "system":
            conversation.system = value
        elif action == "stop":
            say(conversation, "stop", should_stop=lambda most=value: len(conversation.turn.tokens) >= most)
        elif action == "ask" or conversation.messages:
            say(conversation, conversation.undo() if action == "retry" else value)
            assert_answer_is_plain(conversation, conversation.turn.num_cached + conversation.turn.num_read)
        roles = [m["role"] for m in conversation.messages]
        assert roles == ["user", "assistant"] * (len(roles) // 2)
    assert_caches_equal_fresh(conversation)
    text = conversation.tokenizer.decode(conversation.covered)
    assert text.startswith(rendered(conversation)[: -len("assistant: ")][:20])
