"""A line to an S3 server that notes what is sent over it, and on which things go wrong."""

from __future__ import annotations

import http.client
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from tests.patience import limit


@dataclass(frozen=True)
class Request:
    method: str
    path: str
    headers: dict[str, str]
    body: bytes

    @property
    def is_part(self) -> bool:
        return self.method == "PUT" and "partNumber=" in self.path


@dataclass
class Line:
    endpoint: str = ""
    seen: list[Request] = field(default_factory=list)
    parts_under_way: int = 0
    most_parts_at_once: int = 0
    # What becomes of a request (None: the connection is cut instead of an answer) and of an answer's body.
    request: Callable[[Request], bytes | None] = lambda request: request.body
    answer: Callable[[Request, bytes], bytes] = lambda request, body: body


@contextmanager
def line_to(endpoint: str) -> Iterator[Line]:
    line, lock = Line(), threading.Lock()
    host, _, port = endpoint.removeprefix("http://").partition(":")

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def pass_on(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            request = Request(self.command, self.path, {k.lower(): v for k, v in self.headers.items()}, body)
            with lock:
                line.seen.append(request)
                line.parts_under_way += request.is_part
                line.most_parts_at_once = max(line.most_parts_at_once, line.parts_under_way)
            try:
                self._exchange(request)
            except OSError:  # one of the two sides has gone
                self.close_connection = True
            finally:
                with lock:
                    line.parts_under_way -= request.is_part

        def _exchange(self, request: Request) -> None:
            body = line.request(request)
            if body is None:
                self.close_connection = True
                return
            upstream = http.client.HTTPConnection(host, int(port), timeout=limit(60))
            upstream.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
            for key, value in self.headers.items():
                upstream.putheader(key, value)
            upstream.endheaders(body)
            got = upstream.getresponse()
            whole = got.read()
            upstream.close()
            self.send_response_only(got.status)
            for key, value in got.getheaders():
                if key.lower() not in ("transfer-encoding", "connection", "content-length"):
                    self.send_header(key, value)
            length = got.getheader("Content-Length") if self.command == "HEAD" else len(whole)
            self.send_header("Content-Length", str(length))
            self.end_headers()
            if self.command != "HEAD":
                sent = line.answer(request, whole)
                self.wfile.write(sent)
                self.close_connection = len(sent) < len(whole)

        do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = pass_on

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    line.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield line
    finally:
        server.shutdown()
        server.server_close()
        thread.join(limit(10))
