"""HTTP: paths, keys, limits, streams and error bodies. One instance a connection; knows no models."""

import hmac
import json
import logging
import select
import socket
from typing import Any
from urllib.parse import unquote

import mlx.core as mx
from mlx_lm.server import APIHandler

from .answers import Answer
from .errors import ApiError, ClientGone
from .requests import Request, read_request

_POST = {"/v1/completions": False, "/v1/chat/completions": True, "/chat/completions": True}
_LEFT = (BrokenPipeError, ConnectionError, ClientGone, TimeoutError)


class Handler(APIHandler):
    """mlx-lm's handler with our requests, answers and limits."""

    timeout = 60  # seconds that a connection may be silent while it should send

    def log_message(self, text: str, *values: Any) -> None:
        logging.debug(text, *values)

    # Requests.

    def do_GET(self) -> None:
        path = _path(self.path)
        if path == "/health":
            self.handle_health_check()
        elif self._is_allowed():
            if path == "/metrics":
                self._send(200, self._metrics().encode(), "text/plain; version=0.0.4")
            elif path == "/v1/models":
                self._send_json(200, {"object": "list", "data": [self._model()]})
            elif path == f"/v1/models/{self._provider.name}":
                self._send_json(200, self._model())
            else:
                self._send_error(ApiError(404, f"there is nothing at {path or '/'}"))

    def do_POST(self) -> None:
        path = _path(self.path)
        try:
            # Read in any case: a connection closed before its body is read may lose the answer.
            raw = self._read_body()
            if not self._is_allowed():
                return
            body = _parse(raw)
            if path not in _POST:
                raise ApiError(404, f"there is nothing at {path or '/'}; POST goes to {', '.join(_POST)}")
            request, args = read_request(body, _POST[path], self.response_generator.cli_args, self._provider)
            request.is_gone = self._is_gone
            self._serve(request, args)
        except ApiError as error:
            self._send_error(error)
        except ValueError as error:
            self._send_error(ApiError(400, str(error)))
        except _LEFT:
            logging.info("a client left")
        except RuntimeError as error:
            self._send_error(ApiError(500, f"the answer failed: {error}"))

    @property
    def _provider(self) -> Any:
        return self.response_generator.model_provider

    def _is_allowed(self) -> bool:
        key = self.response_generator.cli_args.api_key
        given = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if key is None or hmac.compare_digest(given.encode(), key.encode()):
            return True
        self._send_error(
            ApiError(401, "the key in the header Authorization: Bearer KEY is wrong or missing", code="invalid_api_key")
        )
        return False

    def _read_body(self) -> bytes:
        """Raises ApiError for a body that is too long, or of unknown length."""
        given, limit = self.headers.get("Content-Length"), self.response_generator.cli_args.max_body_bytes
        if given is None:
            raise ApiError(411, "the header Content-Length is missing")
        if not (given.isascii() and given.isdigit()):
            raise ApiError(400, f"the header Content-Length must be a number, got {given!r}")
        if int(given) > limit:
            for _ in range(min(int(given), 4 * limit) >> 16):
                self.rfile.read(1 << 16)
            raise ApiError(413, f"the body has {given} bytes; the limit is {limit}", code="body_too_large")
        return self.rfile.read(int(given))

    def _is_gone(self) -> bool:
        """Whether the client closed the connection; asked by the thread that generates, between tokens."""
        try:
            poll = select.poll()
            poll.register(self.connection, select.POLLIN)
            return bool(poll.poll(0)) and self.connection.recv(1, socket.MSG_PEEK) == b""
        except (OSError, ValueError):
            return True

    # Answers.

    def _serve(self, request: Request, args: Any) -> None:
        self._are_headers_sent = False

        def keep_alive(done: int, total: int) -> None:
            if request.stream:
                self.wfile.write(f": keepalive {done}/{total}\n\n".encode())
                self.wfile.flush()

        context, responses = self.response_generator.generate(request, args, keep_alive)
        answer = Answer(request, args, context, self._provider, self.system_fingerprint)
        try:
            if request.stream:
                self._stream(request, answer, responses)
            else:
                for response in responses:
                    answer.take(response)
                self._send_json(200, answer.whole())
        finally:
            context.stop()

    def _stream(self, request: Request, answer: Answer, responses: Any) -> None:
        self._set_stream_headers(200)
        self.end_headers()
        self._are_headers_sent = True
        self._count(200)
        for response in responses:
            answer.take(response)
            if answer.has_news and response.finish_reason is None:
                self._send_event(answer.chunk())
        self._send_event(answer.chunk(is_last=True))
        if request.include_usage:
            self._send_event(answer.usage_chunk())
        self.wfile.write(b"data: [DONE]\n\n")
        self.wfile.flush()

    def _send_event(self, body: dict) -> None:
        self.wfile.write(f"data: {json.dumps(body)}\n\n".encode())
        self.wfile.flush()

    def _send_json(self, status: int, body: dict) -> None:
        self._send(status, json.dumps(body).encode(), "application/json")

    def _send(self, status: int, body: bytes, content_type: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self._set_cors_headers()
        self.end_headers()
        self.wfile.write(body)
        self.wfile.flush()
        self._count(status)

    def _send_error(self, error: ApiError) -> None:
        """An error as a body, or, once a stream has begun, as its last event."""
        try:
            if getattr(self, "_are_headers_sent", False):
                self._send_event(error.body())
            else:
                self._send_json(error.status, error.body())
        except _LEFT:
            logging.info("a client left before its error")

    def _count(self, status: int) -> None:
        self.response_generator.metrics.add("requests_total", label=f'status="{status}"')

    def _model(self) -> dict:
        return {"id": self._provider.name, "object": "model", "created": self.created, "owned_by": "local"}

    def _metrics(self) -> str:
        generator = self.response_generator
        return generator.metrics.page(
            requests_waiting=generator.num_waiting,
            prompt_cache_sequences=len(generator.prompt_cache),
            prompt_cache_bytes=generator.prompt_cache.nbytes,
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
