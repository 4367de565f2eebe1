"""The paths of the API: what is asked for, its answer or its error, and a line in the log for each.

Knows answers and their streams; knows nothing of sockets or models.
"""

import argparse
import json
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from http.server import ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote

import mlx.core as mx
from mlx_lm.server import get_system_fingerprint

from ..files.json_text import parse_json
from .access import check_access, check_content_type
from .answers import Answer
from .connection import Connection
from .errors import ApiError, ClientGone
from .generator import Token
from .provider import Provider
from .requests import Request, read_request
from .worker import Job, Worker, attempt

_POST = {"/v1/completions": False, "/v1/chat/completions": True, "/chat/completions": True}
_LEFT = (ConnectionError, ClientGone, TimeoutError)
_LEFT_STATUS = 499  # in the log only
_QUIET = {"/health", "/metrics"}  # asked for all the time


class Server(ThreadingHTTPServer):
    """The open port, and what its handlers need: the flags and the worker. Raises OSError if it cannot be opened."""

    request_queue_size = 128  # connections that the system holds until they are accepted

    def __init__(self, flags: argparse.Namespace, worker: Worker):
        self.flags, self.worker, self.fingerprint = flags, worker, get_system_fingerprint()
        self._num_busy, self._changed = 0, threading.Condition()
        host = flags.host.strip("[]")
        found = socket.getaddrinfo(host or None, flags.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        # A name may have addresses of both kinds; clients that know one only know the older one.
        self.address_family, _, _, _, address = min(found, key=lambda each: each[0] != socket.AF_INET)
        super().__init__(address, Handler)
        self.is_local = address[0] == "::1" or address[0].startswith("127.")

    @property
    def url(self) -> str:
        """Where the API is."""
        host = self.flags.host.strip("[]")
        return f"http://{f'[{host}]' if ':' in host else host}:{self.server_port}/v1"

    @contextmanager
    def busy(self) -> Iterator[None]:
        """Count the body as an exchange that is not finished."""
        with self._changed:
            self._num_busy += 1
        try:
            yield
        finally:
            with self._changed:
                self._num_busy -= 1
                self._changed.notify_all()

    def wait_until_idle(self, seconds: float) -> None:
        """Wait until all answers are written, at most for so many seconds."""
        with self._changed:
            self._changed.wait_for(lambda: not self._num_busy, seconds)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log an error of one connection where it disturbs nobody."""
        logging.debug("a connection failed", exc_info=True)


class Handler(Connection):
    """One request and its response."""

    server: Server
    _has_body = False  # whether the request's body was read

    def log_message(self, text: str, *values: Any) -> None:
        """Log what http.server would print."""
        logging.debug(text, *values)

    # Requests.

    def do_GET(self) -> None:
        """Answer with one of the pages: health, metrics, models."""
        self._exchange(self._get)

    def do_POST(self) -> None:
        """Answer a conversation or a prompt, or send the error that keeps it from being answered."""
        self._exchange(self._post)

    def do_OPTIONS(self) -> None:
        """Tell a browser from where it may ask."""
        self._exchange(partial(self._send, 204, b"", "application/json"))

    def _exchange(self, work: Callable[[], None]) -> None:
        """Do the work, or send what it raised, and log what came of it."""
        started = time.monotonic()
        self._status, self._outcome = 0, ""
        with self.server.busy():
            attempt(work, self._fail)
        level = logging.DEBUG if _path(self.path) in _QUIET else logging.INFO
        seconds, what = time.monotonic() - started, ascii(f"{self.command} {self.path}")[1:-1]
        outcome = f"{self._status}{self._outcome}, {seconds:.2f} s"
        logging.log(level, "%s %s: %s", self.client_address[0], what, outcome)

    def _get(self) -> None:
        path = _path(self.path)
        if path == "/health":
            is_healthy = self.server.worker.is_healthy
            body = {"status": "ok" if is_healthy else "unavailable"}
            self._send(200 if is_healthy else 503, json.dumps(body).encode(), "application/json")
            return
        check_access(self.headers, self.server.flags, self.server.is_local)
        if path == "/metrics":
            self._send(200, self._metrics().encode(), "text/plain; version=0.0.4")
            self._count(200)
        elif path == "/v1/models":
            self._send_json(200, {"object": "list", "data": [self._model()]})
        elif path == f"/v1/models/{self._provider.name}":
            self._send_json(200, self._model())
        else:
            raise ApiError(404, f"there is nothing at {path or '/'}")

    def _post(self) -> None:
        path = _path(self.path)
        # Read in any case: a connection closed before its body is read may lose the answer.
        raw = self.read_body(self.server.flags.max_body_bytes)
        self._has_body = True
        check_access(self.headers, self.server.flags, self.server.is_local)
        check_content_type(self.headers)
        body = _parse(raw)
        if path not in _POST:
            raise ApiError(404, f"there is nothing at {path or '/'}; POST goes to {', '.join(_POST)}")
        self._serve(read_request(body, _POST[path], self._provider))

    @property
    def _provider(self) -> Provider:
        return self.server.worker.generator.provider

    # Answers.

    def _serve(self, request: Request) -> None:
        job = Job(request, self.is_gone)
        self.server.worker.submit(job)
        try:
            events = job.events()
            answer = Answer(request, next(events), self._provider, self.server.fingerprint)
            if request.stream:
                self._stream(request, answer, events)
            else:
                for event in events:
                    if isinstance(event, Token):
                        answer.take(event)
                self._send_json(200, answer.whole())
            self._outcome = f", {answer.summary()}"
        finally:
            job.give_up()

    def _stream(self, request: Request, answer: Answer, events: Iterator[Any]) -> None:
        headers = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache", **self._origins()}
        self._status = 200
        self.begin_stream(headers)
        self._count(200)
        for event in events:
            if not isinstance(event, Token):
                done, total = event
                self.write(f": keepalive {done}/{total}\n\n")
                continue
            answer.take(event)
            if answer.has_news and event.finish_reason is None:
                self._send_event(answer.chunk())
        self._send_event(answer.chunk(is_last=True))
        if request.include_usage:
            self._send_event(answer.usage_chunk())
        self.write("data: [DONE]\n\n")
        self.end_stream()

    def _send_event(self, body: dict) -> None:
        self.write(f"data: {json.dumps(body)}\n\n")

    def _send_json(self, status: int, body: dict, **headers: str) -> None:
        self._send(status, json.dumps(body).encode(), "application/json", **headers)
        self._count(status)

    def _send(self, status: int, body: bytes, content_type: str, **headers: str) -> None:
        self._status = status
        self.send_whole(status, body, {"Content-Type": content_type, **self._origins(), **headers})

    def _origins(self) -> dict[str, str]:
        """Return the headers that tell a browser which pages may read the answer."""
        allowed, origin = self.server.flags.allowed_origins, self.headers.get("Origin")
        headers = {"Access-Control-Allow-Methods": "*", "Access-Control-Allow-Headers": "*"}
        if "*" in allowed:
            headers["Access-Control-Allow-Origin"] = "*"
        elif origin in allowed:
            headers |= {"Access-Control-Allow-Origin": origin, "Vary": "Origin"}
        return headers

    # Failures.

    def _fail(self, error: Exception) -> None:
        """Send an error as a body, or, once a stream has begun, as its last event."""
        if isinstance(error, _LEFT):
            self._status, self._outcome = _LEFT_STATUS, ", the client left"
            return
        if not isinstance(error, ApiError):
            error = self._as_api_error(error)
        self._outcome = f", {error.message}"
        attempt(partial(self._send_error, error), self._fail_again)

    def _as_api_error(self, error: Exception) -> ApiError:
        if isinstance(error, ValueError):
            return ApiError(400, str(error))
        logging.error("an answer failed", exc_info=error)
        return ApiError(500, f"the answer failed: {type(error).__name__}: {error}")

    def _send_error(self, error: ApiError) -> None:
        if self.is_streaming:
            self._send_event(error.body())
            self.end_stream()
        elif not self.has_begun:
            again = {"Retry-After": "1"} if error.status in (429, 503) else {}
            self._send_json(error.status, error.body(), **again)
            if not self._has_body:
                self.drain()

    def _fail_again(self, error: Exception) -> None:
        self._outcome += ", and the client left before this error"
        logging.debug("an error could not be sent", exc_info=error)

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
        return parse_json(raw)
    except ValueError as error:
        raise ApiError(400, f"the body is no JSON: {error}") from error
