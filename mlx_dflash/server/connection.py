"""One HTTP connection: reads a request's body, writes a response at once or in parts, and notices a client that left.

Knows HTTP/1.1 and sockets; knows nothing of what is asked or answered.
"""

import re
import select
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler
from typing import Any

from .errors import ApiError

_PROBE_SECONDS = 0.5  # between two looks at whether a client that sends no more is still there
_DRAIN_SECONDS = 2.0  # for which a body that is not wanted is read, so that the client gets to see the answer
_LINE = 1 << 12  # bytes, at most, of a line inside a chunked body


class Connection(BaseHTTPRequestHandler):
    """One connection, which brings one request and is closed after its response.

    has_begun: whether the response's status was sent. is_streaming: whether a response in parts is open.
    """

    protocol_version = "HTTP/1.1"
    timeout = 60  # seconds that a connection may be silent while it should send

    def setup(self) -> None:
        """Prepare the connection."""
        super().setup()
        self._writing = threading.Lock()  # of writes by other threads than the connection's own
        self._is_gone, self._probe_at = False, float("inf")
        self.has_begun = self.is_streaming = self._is_chunked = False

    # Requests.

    def read_body(self, limit: int) -> bytes:
        """Return the request's body, of at most `limit` bytes. Raises ApiError for one that is longer or malformed."""
        coding, given = self.headers.get("Transfer-Encoding"), self.headers.get("Content-Length")
        if coding is not None:
            if given is not None:
                raise ApiError(400, "the headers have both Transfer-Encoding and Content-Length")
            if coding.strip().lower() != "chunked":
                raise ApiError(501, f"the header Transfer-Encoding can be chunked only, got {coding!r}")
            return self._read_chunks(limit)
        if given is None:
            raise ApiError(411, "the header Content-Length is missing")
        if not (given.isascii() and given.isdigit()):
            raise ApiError(400, f"the header Content-Length must be a number, got {given!r}")
        if len(given) > 19 or int(given) > limit:
            raise _too_long(f"the body has {given} bytes", limit)
        return self.rfile.read(int(given))

    def _read_chunks(self, limit: int) -> bytes:
        """Return a body that comes in chunks, each with its size in front of it."""
        body = b""
        while True:
            line = self.rfile.readline(_LINE)
            digits = line.split(b";")[0].strip()
            if not (line.endswith(b"\n") and re.fullmatch(rb"[0-9a-fA-F]{1,16}", digits)):
                raise ApiError(400, f"the body's chunks must begin with their size in hexadecimal digits, got {line!r}")
            size = int(digits, 16)
            if size == 0:
                break
            if len(body) + size > limit:
                raise _too_long(f"the body has at least {len(body) + size} bytes", limit)
            chunk = self.rfile.read(size)
            if len(chunk) < size or self.rfile.readline(3).strip():
                raise ApiError(400, f"a chunk of the body does not have the {size} bytes that it should have")
            body += chunk
        while self.rfile.readline(_LINE).strip():  # trailers
            pass
        return body

    def is_gone(self) -> bool:
        """Whether the client closed the connection; any thread may ask.

        A client that only sends no more still waits for its answer. To the server both look the same until it writes
        to them, so every half second it writes what means nothing.
        """
        if not self._is_gone:
            try:
                self._is_gone = self._has_ended_sending() and self._has_left()
            except (OSError, ValueError):
                self._is_gone = True
        return self._is_gone

    def _has_ended_sending(self) -> bool:
        poll = select.poll()
        poll.register(self.connection, select.POLLIN)
        return bool(poll.poll(0)) and self.connection.recv(1, socket.MSG_PEEK) == b""

    def _has_left(self) -> bool:
        """Whether the system of a client that sends no more refused what was written to it."""
        if self.connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            return True
        now = time.monotonic()
        if self._probe_at == float("inf"):
            self._probe_at = now + _PROBE_SECONDS
        if now >= self._probe_at and self._writing.acquire(blocking=False):
            self._probe_at = now + _PROBE_SECONDS
            try:
                self._probe()
            finally:
                self._writing.release()
        return False

    def _probe(self) -> None:
        poll = select.poll()
        poll.register(self.connection, select.POLLOUT)
        if not poll.poll(0):
            return
        if self.is_streaming:
            self.wfile.write(self._part(": keepalive\n\n"))
        elif not self.has_begun and self.request_version == "HTTP/1.1":
            self.wfile.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    # Responses.

    def send_whole(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        """Send a response at once."""
        self._begin(status, {**headers, "Content-Length": str(len(body))})
        self.wfile.write(body)

    def begin_stream(self, headers: dict[str, str]) -> None:
        """Begin a response in parts. A client of HTTP/1.1 can tell one that is cut from one that ends."""
        self._is_chunked = self.request_version == "HTTP/1.1"
        self._begin(200, {**headers, **({"Transfer-Encoding": "chunked"} if self._is_chunked else {})})
        self.is_streaming = True

    def write(self, text: str) -> None:
        """Send one part of a stream."""
        with self._writing:
            self.wfile.write(self._part(text))

    def end_stream(self) -> None:
        """End a stream as one that is complete."""
        with self._writing:
            self.is_streaming = False
            if self._is_chunked:
                self.wfile.write(b"0\r\n\r\n")

    def drain(self) -> None:
        """Read for a while what the client still sends: closing a connection with data unread may lose the answer."""
        end = time.monotonic() + _DRAIN_SECONDS
        try:
            self.connection.shutdown(socket.SHUT_WR)
            self.connection.settimeout(_DRAIN_SECONDS)
            while self.connection.recv(1 << 16) and time.monotonic() < end:
                pass
        except OSError:
            pass

    def _begin(self, status: int, headers: dict[str, Any]) -> None:
        with self._writing:
            self.has_begun = True
        self.send_response(status)
        for name, value in {**headers, "Connection": "close"}.items():
            self.send_header(name, value)
        self.end_headers()

    def _part(self, text: str) -> bytes:
        data = text.encode()
        return b"%x\r\n%s\r\n" % (len(data), data) if self._is_chunked else data


def _too_long(what: str, limit: int) -> ApiError:
    return ApiError(413, f"{what}; the limit is {limit}", code="body_too_large")
