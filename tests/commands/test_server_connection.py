"""The server's connections, byte by byte: every request gets an answer or an error, and a cut stream shows."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest
from support.server_fixtures import our_server, wait_until

from mlx_dflash.server.answers import Answer

pytestmark = pytest.mark.process

CHAT = "/v1/chat/completions"
HI = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
LONG = {"messages": HI["messages"], "max_tokens": 20000, "logit_bias": {"257": -100}}


@pytest.fixture(scope="module")
def served(pair):
    with our_server(pair) as both:
        yield both


def head(body=b"", path=CHAT, version="HTTP/1.1", method="POST", **headers):
    headers = {"Host": "localhost", "Content_Length": len(body), **headers}
    lines = [
        f"{method} {path} {version}",
        *(f"{k.replace('_', '-')}: {v}" for k, v in headers.items() if v is not None),
    ]
    return "\r\n".join(lines).encode() + b"\r\n\r\n"


def post(body, **headers):
    """The bytes of a request with a JSON body."""
    raw = json.dumps(body).encode()
    return head(raw, **headers) + raw


def connect(client):
    return socket.create_connection((client.base_url.host, client.base_url.port), timeout=30)


def talk(client, data, half_close=False):
    """Send bytes; return (status, headers, body) of the final response."""
    with connect(client) as connection:
        connection.sendall(data)
        if half_close:
            connection.shutdown(socket.SHUT_WR)
        return parse(connection.makefile("rb").read())


def parse(raw):
    while raw.startswith(b"HTTP/1.1 100 "):
        raw = raw.partition(b"\r\n\r\n")[2]
    top, _, body = raw.partition(b"\r\n\r\n")
    status, *lines = top.decode().split("\r\n")
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
    return int(status.split()[1]), headers, body


def unchunk(body):
    """The data of a chunked body, and whether it is complete."""
    data = b""
    while body:
        size, _, body = body.partition(b"\r\n")
        if int(size, 16) == 0:
            return data, body == b"\r\n"
        data, body = data + body[: int(size, 16)], body[int(size, 16) + 2 :]
    return data, False


def events(data):
    return [line.removeprefix("data: ") for line in data.decode().split("\n\n") if line.startswith("data: ")]


@pytest.mark.parametrize("stream", [False, True])
def test_whatever_goes_wrong_the_client_gets_an_error(served, monkeypatch, stream):
    def fail(*args):
        raise KeyError("x")

    monkeypatch.setattr(Answer, "take", fail)
    status, _, body = talk(served[0], post({**HI, "stream": stream}))
    if stream:
        data, is_complete = unchunk(body)
        assert is_complete and (status, "KeyError" in events(data)[-1]) == (200, True), data
    else:
        assert (status, json.loads(body)["error"]["message"]) == (500, "the answer failed: KeyError: 'x'")
    monkeypatch.undo()
    assert talk(served[0], post(HI))[0] == 200


@pytest.mark.parametrize("version", ["HTTP/1.1", "HTTP/1.0"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_sends_no_more_gets_its_answer(served, stream, version):
    body = {**LONG, "max_tokens": 700, "stream": stream}
    status, headers, raw = talk(served[0], post(body, version=version), half_close=True)
    assert status == 200
    if not stream:
        assert json.loads(raw)["usage"]["completion_tokens"] == 700
    elif version == "HTTP/1.1":
        data, is_complete = unchunk(raw)
        assert is_complete and events(data)[-1] == "[DONE]" and headers["transfer-encoding"] == "chunked"
    else:
        assert events(raw)[-1] == "[DONE]" and "transfer-encoding" not in headers


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_sends_no_more_and_then_leaves_frees_its_turn(served, stream):
    client, worker = served
    connection = connect(client)
    connection.sendall(post({**LONG, "stream": stream}))
    connection.shutdown(socket.SHUT_WR)
    assert wait_until(lambda: worker.num_waiting == 1)
    time.sleep(0.7)
    assert worker.num_waiting == 1
    connection.close()
    assert wait_until(lambda: not worker._admitted, 3), "the turn is still taken"


CHUNKED = {"Transfer_Encoding": "chunked", "Content_Length": None}


def chunks(body, size):
    parts = [body[i : i + size] for i in range(0, len(body), size)]
    return b"".join(b"%X;x=y\r\n%s\r\n" % (len(part), part) for part in parts) + b"0\r\nSome: trailer\r\n\r\n"


def test_bodies_in_chunks_are_read(served):
    raw = json.dumps(HI).encode()
    for size in (1, 7, 10_000):
        status, _, body = talk(served[0], head(**CHUNKED) + chunks(raw, size))
        assert status == 200 and json.loads(body)["usage"]["completion_tokens"] <= 3


@pytest.mark.parametrize(
    "body, status",
    [
        (b"zz\r\n{}\r\n0\r\n\r\n", 400),
        (b"-2\r\n{}\r\n0\r\n\r\n", 400),
        (b"5\r\n{}\r\n0\r\n\r\n", 400),
        (b"2\r\n{}", 400),
        (b"", 400),
        (b"FFFFFFFFFFFFFFFF\r\n{", 413),
        (chunks(b"x" * (9 << 20), 1 << 20), 413),
    ],
    ids=lambda value: str(value)[:20],
)
def test_chunks_that_are_wrong_are_refused(served, body, status):
    found, _, answer = talk(served[0], head(**CHUNKED) + body, half_close=True)
    assert found == status and json.loads(answer)["error"]["message"]


def test_both_lengths_or_another_coding_are_refused(served):
    assert talk(served[0], head(Transfer_Encoding="chunked"))[0] == 400
    assert talk(served[0], head(Transfer_Encoding="gzip", Content_Length=None))[0] == 501


@pytest.mark.parametrize("length", [10**10, 10**30])
def test_a_body_that_is_too_long_is_refused_before_it_comes(served, length):
    began = time.monotonic()
    status, _, body = talk(served[0], head(Content_Length=length) + b"{")
    assert status == 413 and json.loads(body)["error"]["code"] == "body_too_large"
    assert time.monotonic() - began < 4


@pytest.mark.parametrize(
    "host, status",
    [
        ("localhost:8080", 200),
        ("127.0.0.1", 200),
        ("[::1]:80", 200),
        ("192.168.1.5", 200),
        ("host.docker.internal:8080", 200),
        (None, 200),
        ("evil.example", 403),
        ("evil.example:8080", 403),
        ("localhost.evil.example", 403),
        ("evillocalhost", 403),
        ("[", 403),
    ],
)
def test_a_local_server_answers_to_local_names_only(served, host, status):
    for data in post(HI, Host=host), head(method="GET", path="/v1/models", Host=host):
        found, _, body = talk(served[0], data)
        assert found == status, body


@pytest.mark.parametrize(
    "headers, status",
    [
        ({"Content_Type": "application/json; charset=utf-8"}, 200),
        ({"Content_Type": "application/x-www-form-urlencoded"}, 200),
        ({"Content_Type": "text/plain;charset=UTF-8"}, 415),
        ({"Content_Type": "multipart/form-data"}, 415),
        ({"Content_Type": "application/x-www-form-urlencoded", "Origin": "https://evil.example"}, 415),
        ({"Content_Type": "application/json", "Origin": "https://some.example"}, 200),
    ],
    ids=str,
)
def test_only_json_is_read_from_pages(served, headers, status):
    assert talk(served[0], post(HI, **headers))[0] == status


def test_allowed_origins_are_the_pages_that_may_ask(pair):
    with our_server(pair, "--allowed-origins", "https://good.example,https://too.example") as (client, _):
        for origin, status in ("https://good.example", 200), ("https://evil.example", 403), ("null", 403):
            found, headers, _ = talk(client, post(HI, Origin=origin, Content_Type="application/json"))
            assert found == status and ("access-control-allow-origin" in headers) == (status == 200)
        assert talk(client, post(HI, Host="too.example"))[0] == 200
        assert talk(client, post(HI, Host="evil.example"))[0] == 403


def test_a_server_for_the_network_answers_to_any_name(pair):
    with our_server(pair, "--host", "0.0.0.0") as (client, _):
        assert talk(client, post(HI, Host="box.example"))[0] == 200


def has_ipv6():
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6")
@pytest.mark.parametrize("host", ["::1", "[::1]", "::"])
def test_addresses_of_both_kinds_are_listened_on(pair, host):
    with our_server(pair, "--host", host) as (client, worker):
        with socket.create_connection(("::1", client.base_url.port), timeout=30) as connection:
            connection.sendall(post(HI, Host="[::1]"))
            assert parse(connection.makefile("rb").read())[0] == 200
        if host == "::":
            assert talk(client, post(HI, Host="localhost"))[0] == 200


def test_one_line_of_the_log_tells_who_asked_and_what_came_of_it(served, caplog):
    caplog.set_level("INFO")
    talk(served[0], post(HI))
    talk(served[0], post({**HI, "stream": True}))
    talk(served[0], post({**HI, "n": 2}))
    talk(served[0], head(method="GET", path="/health"))
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 3, lines
    for line in lines[:2]:
        assert line.startswith("127.0.0.1 POST /v1/chat/completions: 200, ") and " s" in line, line
        assert "prompt tokens (" in line and " cached), 3 tokens, length, " in line, line
    assert ": 400, n must be from 1 to 1, got 2, " in lines[2]


@pytest.fixture
def process(pair):
    """A server in a process of its own. Yields (client-like object, process)."""
    flags = ["--model", str(pair[0]), "--draft-model", str(pair[1]), "--port", "0", "--block-size", "6"]
    process = subprocess.Popen(
        [sys.executable, "-m", "mlx_dflash.server", *flags], stderr=subprocess.PIPE, text=True, env={**os.environ}
    )
    try:
        port = next(line for line in process.stderr if line.startswith("serving")).rpartition(":")[2].split("/")[0]
        yield ("127.0.0.1", int(port)), process
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


def test_a_server_that_is_asked_to_end_finishes_its_answers_or_says_that_it_did_not(process):
    address, process = process
    bodies = [{**LONG, "stream": True}, {**LONG, "max_tokens": 5, "stream": True}, LONG]
    answers = [None] * len(bodies)

    def ask(i):
        with socket.create_connection(address, timeout=60) as connection:
            connection.sendall(post(bodies[i]))
            answers[i] = connection.makefile("rb").read()

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(len(bodies))]
    for thread in threads:
        thread.start()
        time.sleep(0.5)
    process.send_signal(signal.SIGTERM)
    began = time.monotonic()
    assert process.wait(30) == 0
    assert time.monotonic() - began < 20
    for thread in threads:
        thread.join(10)
    data, is_complete = unchunk(parse(answers[0])[2])
    assert is_complete and "the server stopped" in json.loads(events(data)[-1])["error"]["message"]
    for answer in answers[1:]:
        status, _, body = parse(answer)
        assert status == 503 and json.loads(body)["error"]["code"] == "unavailable"


def test_a_server_that_is_asked_to_end_finishes_a_short_answer(process):
    address, process = process
    with socket.create_connection(address, timeout=60) as connection:
        connection.sendall(post({**LONG, "max_tokens": 60, "stream": True}))
        reader = connection.makefile("rb")
        assert reader.readline().startswith(b"HTTP/1.1 200")
        process.send_signal(signal.SIGTERM)
        raw = reader.read()
    data, is_complete = unchunk(raw.partition(b"\r\n\r\n")[2])
    assert is_complete and events(data)[-1] == "[DONE]", data[-300:]
    assert json.loads(events(data)[-2])["choices"][0]["finish_reason"] == "length"
    assert process.wait(30) == 0
