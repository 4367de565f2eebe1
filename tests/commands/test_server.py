"""The server, through the real OpenAI client: its answers are mlx-lm's, however they are asked for."""

import argparse
import json
import threading
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import mlx_lm.server
import pytest
from support.chat_fixtures import TEMPLATE, save_pair
from support.server_fixtures import mlx_lm_server, our_server, wait_until

from mlx_dflash.server import __main__ as command

pytestmark = pytest.mark.process

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
TOOL_TEMPLATE = TEMPLATE + "{% if false %}<tool_call>{{ tool_call.name }}{% endif %}"


@pytest.fixture(scope="module")
def served(pair):
    with our_server(pair) as both:
        yield both


@pytest.fixture(scope="module")
def client(served):
    return served[0]


@pytest.fixture(scope="module")
def tool_client(tmp_path_factory):
    pair = save_pair(
        tmp_path_factory.mktemp("tools"), TOOL_TEMPLATE, ["<think>", "</think>", "<tool_call>", "</tool_call>"]
    )
    with our_server(pair) as (client, _):
        yield client


def chat(client, text="hello", **options):
    options = {"max_tokens": 24, **options}
    messages = text if isinstance(text, list) else [{"role": "user", "content": text}]
    extra = {
        name: options.pop(name)
        for name in ("top_k", "min_p", "repetition_penalty", "num_draft_tokens")
        if name in options
    }
    return client.chat.completions.create(model="default_model", messages=messages, extra_body=extra, **options)


def get(client, path, key=None):
    request = urllib.request.Request(str(client.base_url).removesuffix("v1/") + path)
    if key:
        request.add_header("Authorization", f"Bearer {key}")
    return urllib.request.urlopen(request, timeout=30).read().decode()


def metric(client, name):
    lines = [line.split() for line in get(client, "metrics").splitlines() if not line.startswith("#")]
    return sum(float(value) for key, value in lines if key.partition("{")[0] == f"mlx_dflash_{name}")


MODES = [
    {},
    {"temperature": 1.0, "seed": 1},
    {"temperature": 0.7, "top_p": 0.8, "seed": 2},
    {"temperature": 1.5, "top_k": 7, "seed": 3},
    {"temperature": 1.0, "min_p": 0.2, "seed": 4},
    {"repetition_penalty": 1.3},
    {"presence_penalty": 1.5, "frequency_penalty": 0.5},
    {"logit_bias": {"54": -100}},
    {"stop": ["66"]},
    {"temperature": 1.0, "seed": 5, "stop": ["a", "b"]},
]


def test_answers_are_those_of_mlx_lm_server(client, pair):
    with mlx_lm_server(pair) as reference:
        for mode in MODES:
            ours, theirs = chat(client, **mode), chat(reference, **mode)
            assert ours.choices[0].message.content == theirs.choices[0].message.content, mode
            assert ours.choices[0].finish_reason == theirs.choices[0].finish_reason, mode
            assert ours.usage.completion_tokens == theirs.usage.completion_tokens, mode
        ours, theirs = (
            c.completions.create(model="default_model", prompt="abc", max_tokens=9, seed=1) for c in (client, reference)
        )
        assert ours.choices[0].text == theirs.choices[0].text


@pytest.mark.parametrize("mode", MODES[:2] + MODES[8:], ids=str)
def test_stream_is_the_whole_in_pieces(client, mode):
    whole = chat(client, **mode)
    chunks = list(chat(client, stream=True, stream_options={"include_usage": True}, **mode))
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == whole.choices[0].message.content
    assert [c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason] == [
        whole.choices[0].finish_reason
    ]
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens and chunks[-1].choices == []
    assert {c.id for c in chunks} == {chunks[0].id}


@pytest.mark.parametrize("temperature", [1e-31, 1e-40, 5e-324])
def test_the_least_temperatures_are_greedy(client, temperature):
    assert chat(client, temperature=temperature, seed=1).choices[0].message == chat(client).choices[0].message


def test_parts_of_a_stream_add_up(client, tool_client):
    call = r'start: <think> "hm" </think> "ok" <tool_call> "{\"name\": \"add\", \"arguments\": {}}" </tool_call> "so"'
    plain = (client, r'start: "some words"', {"logprobs": True})
    for asked, lark, options in plain, (tool_client, call, {"tools": TOOLS}):
        grammar = {"response_format": {"type": "lark", "lark": lark}}
        messages = [{"role": "user", "content": "hello"}]
        body = {"model": "default_model", "messages": messages, "max_tokens": 99, "extra_body": grammar, **options}
        whole = asked.chat.completions.create(**body).choices[0]
        with asked.chat.completions.stream(**body) as stream:
            summed = stream.get_final_completion().choices[0]
        assert summed.message.role == "assistant"
        for name in ("content", "reasoning"):
            assert getattr(summed.message, name, None) == getattr(whole.message, name, None)
        calls = [[c.function.arguments for c in choice.message.tool_calls or []] for choice in (whole, summed)]
        assert calls[0] == calls[1] and summed.finish_reason == whole.finish_reason
        roles = [c.choices[0].delta.role for c in asked.chat.completions.create(**body, stream=True)]
        assert roles == ["assistant"] + [None] * (len(roles) - 1) and len(roles) > 1


def test_second_turn_reads_only_what_is_new(client):
    messages = [{"role": "user", "content": "remember this long message"}]
    first = chat(client, messages)
    messages += [
        {"role": "assistant", "content": first.choices[0].message.content},
        {"role": "user", "content": "and?"},
    ]
    second = chat(client, messages)
    cached = second.usage.prompt_tokens_details.cached_tokens
    # An answer that the length cut has no end-of-turn token.
    assert cached == first.usage.prompt_tokens + first.usage.completion_tokens
    plain = chat(client, messages, num_draft_tokens=0, logit_bias={"300": 0.0})
    assert plain.choices[0].message.content == second.choices[0].message.content


def test_usage_tells_what_drafting_did(client):
    usage = chat(client).usage
    details = usage.completion_tokens_details
    assert details.accepted_prediction_tokens > 0 and details.rounds < usage.completion_tokens
    # One token comes from the prompt's own pass, each round brings one and the drafts that were kept.
    assert 1 + details.rounds + details.accepted_prediction_tokens == usage.completion_tokens
    assert chat(client, num_draft_tokens=0).usage.completion_tokens_details.accepted_prediction_tokens == 0


def test_logprobs_name_the_tokens(client):
    choice = chat(client, logprobs=True, top_logprobs=3, temperature=0.3, seed=1).choices[0]
    content = choice.logprobs.content
    assert b"".join(bytes(t.bytes) for t in content if t.bytes).decode() == "".join(
        c for c in choice.message.content if c != "\ufffd"
    )
    assert all(len(t.top_logprobs) == 3 and t.logprob <= t.top_logprobs[0].logprob <= 0 for t in content)
    chunks = chat(client, logprobs=True, top_logprobs=3, temperature=0.3, seed=1, stream=True)
    assert [t.logprob for c in chunks for t in c.choices[0].logprobs.content] == pytest.approx(
        [t.logprob for t in content], abs=1e-3
    )
    old = client.completions.create(model="default_model", prompt="abc", max_tokens=5, logprobs=2).choices[0]
    assert "".join(old.logprobs.tokens) == old.text and len(old.logprobs.token_logprobs) == 5
    assert old.logprobs.text_offset == [0, 1, 2, 3, 4]


def test_tool_calls_and_reasoning(tool_client):
    call = (
        r'start: <think> "hm" </think> "ok" <tool_call> "{\"name\": \"add\", \"arguments\": {\"a\": 1}}" </tool_call>'
    )
    grammar = {"response_format": {"type": "lark", "lark": call}}
    body = {
        "model": "default_model",
        "messages": [{"role": "user", "content": "1+1"}],
        "tools": TOOLS,
        "max_tokens": 120,
    }
    whole = tool_client.chat.completions.create(**body, extra_body=grammar).choices[0]
    assert whole.finish_reason == "tool_calls" and whole.message.content == "ok" and whole.message.reasoning == "hm"
    function = whole.message.tool_calls[0].function
    assert function.name == "add" and json.loads(function.arguments) == {"a": 1}
    deltas = [c.choices[0].delta for c in tool_client.chat.completions.create(**body, extra_body=grammar, stream=True)]
    streamed = [call for delta in deltas for call in delta.tool_calls or []]
    assert [c.function.name for c in streamed] == ["add"] and streamed[0].index == 0
    assert "".join(getattr(d, "reasoning", None) or "" for d in deltas) == "hm"


SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["x", "yy"]}, "size": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "size"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("mode", [{}, {"temperature": 1.0, "seed": 7}], ids=str)
def test_structured_output_keeps_the_schema_with_and_without_drafts(client, mode):
    wanted = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA}}
    drafted = chat(client, max_tokens=100, response_format=wanted, **mode)
    plain = chat(client, max_tokens=100, response_format=wanted, num_draft_tokens=0, **mode)
    assert drafted.choices[0].message.content == plain.choices[0].message.content
    value = json.loads(drafted.choices[0].message.content)
    assert value["name"] in ("x", "yy") and 0 <= value["size"] <= 99 and drafted.choices[0].finish_reason == "stop"


def test_many_clients_get_what_one_gets(client, served):
    def ask(i):
        mode = MODES[i % len(MODES)]
        mode = {"temperature": 1.0, "seed": i, **mode} if i % 3 else mode
        if i % 2:
            chunks = chat(client, f"message {i % 7}", stream=True, **mode)
            return "".join(c.choices[0].delta.content or "" for c in chunks)
        return chat(client, f"message {i % 7}", **mode).choices[0].message.content or ""

    alone = [ask(i) for i in range(24)]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(ask, range(24)))
    assert together == alone
    assert served[1].num_waiting == 0


@pytest.mark.parametrize("stream", [True, False])
def test_client_that_leaves_frees_the_slot(client, served, stream):
    before, generator = metric(client, "clients_gone_total"), served[1]
    tokens_before = metric(client, "completion_tokens_total")
    if stream:
        chunks = chat(client, "go on for ever", stream=True, max_tokens=20000, logit_bias={"257": -100})
        next(iter(chunks))
        chunks.close()
    else:
        import http.client

        connection = http.client.HTTPConnection(client.base_url.host, client.base_url.port, timeout=30)
        body = {"messages": [{"role": "user", "content": "go on"}], "max_tokens": 20000, "logit_bias": {"257": -100}}
        connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
        assert wait_until(lambda: generator.num_waiting == 1)
        connection.close()
    assert wait_until(lambda: not generator._admitted), "the slot is still taken"
    assert metric(client, "clients_gone_total") == before + 1
    assert metric(client, "completion_tokens_total") - tokens_before < 3000
    assert chat(client).choices[0].message.content


def test_queue_is_limited(pair):
    import openai

    with our_server(pair, "--max-queue", "1") as (client, generator):
        streams = [chat(client, stream=True, max_tokens=3000, logit_bias={"257": -100})]
        next(iter(streams[0]))
        waiting = threading.Thread(target=chat, args=(client, "wait"))
        waiting.start()
        assert wait_until(lambda: generator.num_waiting == 2)
        with pytest.raises(openai.RateLimitError, match="waiting already") as caught:
            chat(client)
        assert caught.value.response.headers["Retry-After"] == "1"
        streams[0].close()
        waiting.join()
        assert chat(client).choices[0].message.content


def test_key_limits_and_pages(pair):
    import openai

    flags = ["--api-key", "secret", "--max-body-bytes", "5000", "--max-tokens-limit", "50"]
    with our_server(pair, *flags) as (client, _):
        assert chat(client).choices[0].finish_reason
        with pytest.raises(openai.AuthenticationError):
            chat(client.with_options(api_key="wrong"))
        with pytest.raises(openai.BadRequestError, match="at most 50"):
            chat(client, max_tokens=51)
        with pytest.raises(openai.APIStatusError, match="limit is 5000") as caught:
            chat(client, "x" * 6000)
        assert caught.value.status_code == 413
        assert json.loads(get(client, "health")) == {"status": "ok"}
        models = client.models.list().data
        assert [m.id for m in models] == [str(pair[0])] and client.models.retrieve(models[0].id).object == "model"
        page = get(client, "metrics", "secret")
        assert 'mlx_dflash_requests_total{status="401"} 1' in page and "mlx_dflash_acceptance_length" in page


def test_flags_default_to_what_they_are_in_mlx_lm(monkeypatch):
    defaults, parse = [], argparse.ArgumentParser.parse_args

    def stop(parser, *args):
        defaults.append(vars(parse(parser, [])))
        raise KeyboardInterrupt

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", stop)
    for main in (mlx_lm.server.main, command.main):
        with pytest.raises((KeyboardInterrupt, SystemExit)):
            main()
    theirs, ours = defaults
    # Ours has the block of the draft, an object where theirs has its text, and a number for no limit.
    shared = (theirs.keys() & ours.keys()) - {"num_draft_tokens", "chat_template_args", "prompt_cache_bytes"}
    assert {name: ours[name] for name in shared} == {name: theirs[name] for name in shared}
    assert {"temp", "top_p", "top_k", "min_p", "max_tokens"} <= shared
