"""HTTP: the port, paths, keys, limits, streams and error bodies. One handler a connection; knows no models."""

import argparse
import hmac
import json
import logging
import select
import socket
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote

import mlx.core as mx
from mlx_lm.server import get_system_fingerprint

from .answers import Answer
from .errors import ApiError, ClientGone
from .generator import Token
from .provider import Provider
from .requests import Request, read_request
from .worker import Job, Worker

_POST = {"/v1/completions": False, "/v1/chat/completions": True, "/chat/completions": True}
_LEFT = (BrokenPipeError, ConnectionError, ClientGone, TimeoutError)


class Server(ThreadingHTTPServer):
    """The open port, and what its handlers need: the flags and the worker. Raises OSError if it cannot be opened."""

    request_queue_size = 128  # connections that the system holds until they are accepted

    def __init__(self, flags: argparse.Namespace, worker: Worker):
        self.flags, self.worker, self.fingerprint = flags, worker, get_system_fingerprint()
        super().__init__((flags.host, flags.port), Handler)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log an error of one connection where it disturbs nobody."""
        logging.debug("a connection failed", exc_info=True)


class Handler(BaseHTTPRequestHandler):
    """One connection, which brings one request."""

    server: Server
    timeout = 60  # seconds that a connection may be silent while it should send
    _are_headers_sent = False  # of a stream

    def log_message(self, text: str, *values: Any) -> None:
        """Log what http.server would print."""
        logging.debug(text, *values)

    # Requests.

    def do_GET(self) -> None:
        """Answer with one of the pages: health, metrics, models."""
        path = _path(self.path)
        if path == "/health":
            is_healthy = self.server.worker.is_healthy
            body = {"status": "ok" if is_healthy else "unavailable"}
            self._send(200 if is_healthy else 503, json.dumps(body).encode(), "application/json")
        elif self._is_allowed():
            if path == "/metrics":
                self._send(200, self._metrics().encode(), "text/plain; version=0.0.4")
                self._count(200)
            elif path == "/v1/models":
                self._send_json(200, {"object": "list", "data": [self._model()]})
            elif path == f"/v1/models/{self._provider.name}":
                self._send_json(200, self._model())
            else:
                self._send_error(ApiError(404, f"there is nothing at {path or '/'}"))

    def do_OPTIONS(self) -> None:
        """Tell a browser from where it may ask."""
        self.send_response(204)
        self.send_header("Content-Type", "application/json")
        self._send_origins()
        self.end_headers()

    def do_POST(self) -> None:
        """Answer a conversation or a prompt, or send the error that keeps it from being answered."""
        path = _path(self.path)
        try:
            # Read in any case: a connection closed before its body is read may lose the answer.
            raw = self._read_body()
            if not self._is_allowed():
                return
            body = _parse(raw)
            if path not in _POST:
                raise ApiError(404, f"there is nothing at {path or '/'}; POST goes to {', '.join(_POST)}")
            self._serve(read_request(body, _POST[path], self._provider))
        except ApiError as error:
            self._send_error(error)
        except ValueError as error:
            self._send_error(ApiError(400, str(error)))
        except _LEFT:
            logging.info("a client left")
        except RuntimeError as error:
            self._send_error(ApiError(500, f"the answer failed: {error}"))

    @property
    def _provider(self) -> Provider:
        return self.server.worker.generator.provider

    def _is_allowed(self) -> bool:
        key = self.server.flags.api_key
        given = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if key is None or hmac.compare_digest(given.encode(), key.encode()):
            return True
        self._send_error(
            ApiError(401, "the key in the header Authorization: Bearer KEY is wrong or missing", code="invalid_api_key")
        )
        return False

    def _read_body(self) -> bytes:
        """Return the request's body. Raises ApiError for one that is too long, or of unknown length."""
        given, limit = self.headers.get("Content-Length"), self.server.flags.max_body_bytes
        if given is None:
            raise ApiError(411, "the header Content-Length is missing")
        if not (given.isascii() and given.isdigit()):
            raise ApiError(400, f"the header Content-Length must be a number, got {given!r}")
        if int(given) > limit:
            for _ in range(min(int(given), 4 * limit) >> 16):
                self.rfile.read(1 << 16)
            raise ApiError(413, f"the body has {given} bytes; the limit is {limit}", code="body_too_large")
        return self.rfile.read(int(given))

    def _is_closed(self) -> bool:
        """Whether the client closed the connection; the thread that generates asks between tokens."""
        try:
            poll = select.poll()
            poll.register(self.connection, select.POLLIN)
            return bool(poll.poll(0)) and self.connection.recv(1, socket.MSG_PEEK) == b""
        except (OSError, ValueError):
            return True

    # Answers.

    def _serve(self, request: Request) -> None:
        job = Job(request, self._is_closed)
        self.server.worker.submit(job)
        try:
            events = job.events()
            answer = Answer(request, next(events), self._provider, self.server.fingerprint)
            if request.stream:
                self._stream(request, answer, events)
                return
            for event in events:
                if isinstance(event, Token):
                    answer.take(event)
            self._send_json(200, answer.whole())
        finally:
            job.give_up()

    def _stream(self, request: Request, answer: Answer, events: Iterator[Any]) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Cache-Control", "no-cache")
        self._send_origins()
        self.end_headers()
        self._are_headers_sent = True
        self._count(200)
        for event in events:
            if not isinstance(event, Token):
                done, total = event
                self._write(f": keepalive {done}/{total}\n\n")
                continue
            answer.take(event)
            if answer.has_news and event.finish_reason is None:
                self._send_event(answer.chunk())
        self._send_event(answer.chunk(is_last=True))
        if request.include_usage:
            self._send_event(answer.usage_chunk())
        self._write("data: [DONE]\n\n")

    def _send_event(self, body: dict) -> None:
        self._write(f"data: {json.dumps(body)}\n\n")

    def _write(self, text: str) -> None:
        self.wfile.write(text.encode())
        self.wfile.flush()

    def _send_json(self, status: int, body: dict) -> None:
        self._send(status, json.dumps(body).encode(), "application/json")
        self._count(status)

    def _send(self, status: int, body: bytes, content_type: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self._send_origins()
        self.end_headers()
        self.wfile.write(body)
        self.wfile.flush()

    def _send_origins(self) -> None:
        """Send the headers that tell a browser which pages may read the answer."""
        allowed, origin = self.server.flags.allowed_origins, self.headers.get("Origin")
        if "*" in allowed:
            self.send_header("Access-Control-Allow-Origin", "*")
        elif origin in allowed:
            self.send_header("Access-Control-Allow-Origin", origin)
            self.send_header("Vary", "Origin")
        self.send_header("Access-Control-Allow-Methods", "*")
        self.send_header("Access-Control-Allow-Headers", "*")

    def _send_error(self, error: ApiError) -> None:
        """Send an error as a body, or, once a stream has begun, as its last event."""
        try:
            if self._are_headers_sent:
                self._send_event(error.body())
            else:
                self._send_json(error.status, error.body())
        except _LEFT:
            logging.info("a client left before its error")

    def _count(self, status: int) -> None:
        self.server.worker.metrics.add("requests_total", label=f'status="{status}"')

    def _model(self) -> dict:
        return {"id": self._provider.name, "object": "model", "created": int(time.time()), "owned_by": "local"}

    def _metrics(self) -> str:
        worker, prompt_cache = self.server.worker, self.server.worker.generator.prompt_cache
        return worker.metrics.page(
            requests_waiting=worker.num_waiting,
            prompt_cache_sequences=len(prompt_cache),
            prompt_cache_bytes=prompt_cache.nbytes,
            active_memory_bytes=mx.get_active_memory(),
            peak_memory_bytes=mx.get_peak_memory(),
        )


def _path(target: str) -> str:
    return unquote(target.split("?")[0]).rstrip("/")


def _parse(raw: bytes) -> Any:
    try:
        return json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is no JSON: {error}") from error
