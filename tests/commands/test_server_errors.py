"""Bad requests: each gets an OpenAI-style error that names the field, and none of them hurts the server."""

import http.client
import json
import random
import socket

import pytest
from support.server_fixtures import our_server

from mlx_dflash.server.requests import _FIELDS, _NUMBER

pytestmark = pytest.mark.process

CHAT = "/v1/chat/completions"
GOOD = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
WRONG = [
    ({"messages": None}, "messages", 400),
    ({"messages": []}, "messages", 400),
    ({"messages": "hi"}, "messages", 400),
    ({"messages": ["hi"]}, "messages[0]", 400),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content", 400),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]},
        "messages[0].content",
        400,
    ),
    (
        {"messages": [{"role": "assistant", "content": "", "tool_calls": [{"function": {"arguments": "{"}}]}]},
        "messages[0].tool_calls",
        400,
    ),
    ({"max_tokens": 0}, "max_tokens", 400),
    ({"max_tokens": True}, "max_tokens", 400),
    ({"max_tokens": 10**9}, "max_tokens", 400),
    ({"temperature": -0.1}, "temperature", 400),
    ({"temperature": float("nan")}, "temperature", 400),
    ({"temperature": "hot"}, "temperature", 400),
    ({"top_p": 2}, "top_p", 400),
    ({"n": 2}, "n", 400),
    ({"seed": -1}, "seed", 400),
    ({"stop": [1]}, "stop", 400),
    ({"stop": ""}, "stop", 400),
    ({"logit_bias": {"x": 1}}, "logit_bias", 400),
    ({"logit_bias": {"5000": 1}}, "logit_bias", 400),
    ({"logprobs": 3}, "logprobs", 400),
    ({"top_logprobs": 3}, "top_logprobs", 400),
    ({"stream": "yes"}, "stream", 400),
    ({"stream_options": {"x": 1}}, "stream_options", 400),
    ({"tools": [{}]}, "tools", 400),
    ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools", 400),
    ({"tool_choice": "required"}, "tool_choice", 400),
    ({"num_draft_tokens": 99}, "num_draft_tokens", 400),
    ({"model": "other"}, "model", 404),
    ({"draft_model": "other"}, "draft_model", 404),
    ({"adapters": "other"}, "adapters", 400),
    ({"response_format": {"type": "xml"}}, "response_format", 400),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "nonsense"}}}},
        "response_format",
        400,
    ),
    ({"response_format": {"type": "lark", "lark": "start: ("}}, "response_format", 400),
    ({"chat_template_kwargs": {"tokenize": False}}, "messages", 400),
    ({"messages": [{"role": "user", "content": "x" * 5000}]}, "messages", 400),
    ({"best_friend": 1}, "best_friend", 400),
    ({"xtc_threshold": 0.7}, "xtc_threshold", 400),
    ({"repetition_penalty": 1e-40}, "repetition_penalty", 400),
    ({"logit_bias": {"65": "nan"}}, "logit_bias", 400),
    ({"logit_bias": {"65": 1e39}}, "logit_bias", 400),
    ({"presence_penalty": -1e39}, "presence_penalty", 400),
    ({"repetition_context_size": 10**30}, "repetition_context_size", 400),
]
INFINITE = [float("inf"), float("-inf"), float("nan"), 10**400]
NUMBERS = [name for name, (kinds, *_) in _FIELDS.items() if kinds in (_NUMBER, int)]


@pytest.fixture(scope="module")
def served(pair):
    with our_server(pair) as both:
        yield both


def post(client, body, path="/v1/chat/completions", **headers):
    """Send bytes as they are. Returns (status, parsed body)."""
    connection = http.client.HTTPConnection(client.base_url.host, client.base_url.port, timeout=30)
    connection.request("POST", path, body, headers)
    response = connection.getresponse()
    status, raw = response.status, response.read()
    connection.close()
    return status, json.loads(raw, parse_constant=_refuse)


def _refuse(text):
    raise AssertionError(f"{text} is no JSON")


def assert_still_good(client):
    status, body = post(client, json.dumps(GOOD))
    assert status == 200 and body["choices"][0]["finish_reason"] in ("length", "stop"), body


@pytest.mark.parametrize("change, field, status", WRONG, ids=lambda x: str(x)[:60])
def test_error_names_the_field(served, change, field, status):
    found, body = post(served[0], json.dumps({**GOOD, **change}))
    assert (found, body["error"]["param"]) == (status, field), body
    assert body["error"]["message"] and body["error"]["type"] and "Traceback" not in body["error"]["message"]


@pytest.mark.parametrize(
    "body, path, status",
    [
        (b"{", "/v1/chat/completions", 400),
        (b"\xff\xfe", "/v1/chat/completions", 400),
        (b"[1]", "/v1/chat/completions", 400),
        (b"[" * 100_000, "/v1/chat/completions", 400),
        (b'{"messages": [{"role": "user", "content": "a"}], "tools": ' + b"[" * 900 + b"]" * 900 + b"}", CHAT, 400),
        (b'{"metadata": {"a": ' + b"[" * 900 + b"]" * 900 + b"}}", CHAT, 400),
        (b"{}", "/v1/embeddings", 404),
        (b'{"prompt": ""}', "/v1/completions", 400),
        (b'{"prompt": ["a", "b"]}', "/v1/completions", 400),
        (b'{"prompt": "a", "echo": true}', "/v1/completions", 400),
    ],
)
def test_bodies_and_paths(served, body, path, status):
    found, parsed = post(served[0], body, path)
    assert found == status and parsed["error"]["message"], parsed


@pytest.mark.parametrize("number", INFINITE, ids=["inf", "-inf", "nan", "10**400"])
def test_numbers_that_are_not_finite_are_refused_wherever_they_stand(served, number):
    call = {"function": {"name": "f", "arguments": json.dumps({"a": number})}}
    changes = {
        **dict.fromkeys(NUMBERS, number),
        "logit_bias": {"65": number},
        "stop": [number],
        "metadata": {"a": [number]},
        "chat_template_kwargs": {"a": number},
        "response_format": {"type": "json_schema", "json_schema": {"schema": {"const": number}}},
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {"default": number}}}],
        "messages": [{"role": "user", "content": "hi", "a": number}],
        "messages[0].tool_calls": [{"role": "assistant", "content": "", "tool_calls": [call]}],
    }
    for field, value in changes.items():
        name = field.partition("[")[0]
        status, body = post(served[0], json.dumps({**GOOD, name: value}))
        assert (status, body.get("error", {}).get("param")) == (400, field), body


@pytest.mark.parametrize("name", NUMBERS)
def test_the_largest_numbers_give_an_answer_or_an_error_that_names_the_field(served, name):
    kinds, low, high = _FIELDS[name]
    for number in {low, high, *((2**62,) if kinds is int else (1e308, 1e-308, -1e308))} - {None, float("inf")}:
        change = {"temperature": 1, "seed": 1, "logprobs": True, name: number}
        status, body = post(served[0], json.dumps({**GOOD, **change}))
        assert status == 200 or (status, body["error"]["param"]) == (400, name), (number, body)


@pytest.mark.parametrize("field", ["prompt", "stop", "user", "response_format"])
def test_half_a_surrogate_pair_is_an_error_of_its_own_field(served, field):
    value = {"type": "regex", "regex": "\ud83d"} if field == "response_format" else "\ud83d"
    status, body = post(served[0], json.dumps({"prompt": "hi", field: value}), "/v1/completions")
    assert (status, body["error"]["param"]) == (400, field) and "U+D83D" in body["error"]["message"]


def test_a_thousand_malformed_requests_leave_the_server_well(served):
    client, generator = served
    dice = random.Random(0)
    odd = [None, True, -1, 10**30, 1.5, "", "x", [], [None], {}, {"a": [1]}, "\ud800", float("inf")]
    fields = [
        "messages",
        "max_tokens",
        "temperature",
        "stop",
        "seed",
        "tools",
        "logit_bias",
        "response_format",
        "stream_options",
        "zzz",
        "model",
    ]
    statuses = []
    for i in range(1000):
        body = {**GOOD, **{dice.choice(fields): dice.choice(odd) for _ in range(dice.randint(1, 3))}, "n": 2}
        text = json.dumps(body).encode()
        if i % 3 == 0:
            at = dice.randrange(len(text))
            text = text[:at] + bytes([dice.randrange(256)]) * dice.randint(1, 3) + text[at + dice.randint(0, 5) :]
        status, parsed = post(client, text)
        statuses.append(status)
        assert 400 <= status < 500 and set(parsed["error"]) == {"message", "type", "param", "code"}, (
            text,
            status,
            parsed,
        )
    assert generator.is_healthy and generator.num_waiting == 0
    assert_still_good(client)


@pytest.mark.parametrize(
    "head",
    [
        b"POST /v1/chat/completions HTTP/1.1\r\n\r\n",
        b"POST /v1/chat/completions HTTP/1.1\r\nContent-Length: -5\r\n\r\n",
        b"POST /v1/chat/completions HTTP/1.1\r\nContent-Length: many\r\n\r\n",
        b"nonsense\r\n\r\n",
        b"GET " + b"x" * 70_000 + b"\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00",
    ],
    ids=["no length", "negative", "no number", "no http", "long line", "tls"],
)
def test_what_is_hardly_http_is_refused(served, head):
    client = served[0]
    with socket.create_connection((client.base_url.host, client.base_url.port), timeout=30) as connection:
        connection.sendall(head)
        connection.shutdown(socket.SHUT_WR)
        try:
            answer = connection.makefile("rb").read()
        except ConnectionResetError:
            answer = b""
    assert b" 200 " not in answer.split(b"\r\n")[0]
    assert_still_good(client)
