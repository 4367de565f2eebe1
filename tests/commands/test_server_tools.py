"""What a model writes between the marks of a tool call: a call, or else text that must not be lost."""

import json

import pytest
from support.chat_fixtures import TEMPLATE, save_pair
from support.server_fixtures import our_server

pytestmark = pytest.mark.process

TOOL_TEMPLATE = TEMPLATE + "{% if false %}<tool_call>{{ tool_call.name }}{% endif %}"
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
NO_CALLS = [
    '{"name": "add"}',
    '{"name": "add", "arguments": null}',
    '{"name": "add", "arguments": [1]}',
    '{"name": "add", "arguments": "1 + 1"}',
    '{"name": "add", "arguments": {"a": 1e400}}',
    '{"name": 5, "arguments": {}}',
    '{"type": "function", "function": {"name": "add", "arguments": {}}}',
    '[{"name": "add", "arguments": {}}, 5]',
    "[]",
    "null",
    '"add"',
    "add(1)",
    "[" * 400,
    " ",
    "",
]


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    with our_server(save_pair(tmp_path_factory.mktemp("tools"), TOOL_TEMPLATE, ["<tool_call>", "</tool_call>"])) as (
        client,
        _,
    ):
        yield client


def ask(client, *parts, end="</tool_call>", max_tokens=500, **options):
    """Let the model write "a" and then texts as calls of a tool. Returns (content, calls, finish_reason)."""
    calls = " ".join(f"<tool_call> {json.dumps(text) if text else ''} {end}" for text in parts)
    body = {
        "model": "default_model",
        "messages": [{"role": "user", "content": "1+1"}],
        "tools": TOOLS,
        "max_tokens": max_tokens,
        "extra_body": {"response_format": {"type": "lark", "lark": f'start: "a" {calls}'}},
    }
    if not options.get("stream"):
        choice = client.chat.completions.create(**body).choices[0]
        return choice.message.content, choice.message.tool_calls, choice.finish_reason
    choices = [chunk.choices[0] for chunk in client.chat.completions.create(**body, stream=True)]
    calls = [call for choice in choices for call in choice.delta.tool_calls or []]
    return "".join(c.delta.content or "" for c in choices), calls or None, choices[-1].finish_reason


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("text", NO_CALLS, ids=lambda text: text[:40])
def test_text_that_is_no_call_stays_content(client, text, stream):
    assert ask(client, text, stream=stream) == (f"a<tool_call>{text}</tool_call>", None, "stop")


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_that_is_cut_stays_content(client, stream):
    content, calls, reason = ask(client, '{"name": "add", "arguments": {}}', stream=stream, max_tokens=12)
    assert (content, calls, reason) == ('a<tool_call>{"name": "', None, "length")


@pytest.mark.parametrize("stream", [False, True])
def test_arguments_are_encoded_once(client, stream):
    written = '{"name": "add", "arguments": "{\\"a\\": 1}"}', '{"name": "add", "arguments": {"b": "é"}}'
    content, calls, reason = ask(client, *written, stream=stream)
    assert (content, reason) == ("a", "tool_calls")
    assert [(c.function.name, json.loads(c.function.arguments)) for c in calls] == [
        ("add", {"a": 1}),
        ("add", {"b": "é"}),
    ]
    assert len({c.id for c in calls}) == 2
    if stream:
        assert [c.index for c in calls] == [0, 1]


def test_a_call_and_text_that_is_none_both_arrive(client):
    content, calls, reason = ask(client, "add(1)", '{"name": "add", "arguments": {}}')
    assert (content, len(calls), reason) == ("a<tool_call>add(1)</tool_call>", 1, "tool_calls")


def test_a_completion_is_the_text_as_it_was_written(client):
    lark = 'start: "a" <tool_call> "{\\"name\\": \\"add\\", \\"arguments\\": {}}" </tool_call> "b"'
    grammar = {"response_format": {"type": "lark", "lark": lark}}
    choice = client.completions.create(model="default_model", prompt="x", max_tokens=99, extra_body=grammar).choices[0]
    assert choice.text == 'a<tool_call>{"name": "add", "arguments": {}}</tool_call>b'
    assert choice.finish_reason == "stop"
