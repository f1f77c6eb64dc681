"""What containers print, kept with the time of each line, and served as a kubelet does to the API server."""

from __future__ import annotations

import datetime as dt
import shutil
import ssl
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import IO
from urllib.parse import parse_qs, urlsplit


class Log:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._over = threading.Event()
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()

    def copy(self, source: IO[bytes]) -> None:
        """Until the container ends."""
        try:
            with open(self._path, "ab", buffering=0) as out:
                for line in source:
                    stamp = dt.datetime.now(dt.UTC).strftime("%Y-%m-%dT%H:%M:%S.%f000Z")
                    out.write(stamp.encode() + b" " + line.rstrip(b"\n") + b"\n")
        finally:
            self._over.set()

    def end(self, most_lines: int = 80, most_bytes: int = 2048) -> str:
        """The last words, as much of them as a pod's status takes."""
        last = list(self.lines(False, most_lines, ""))
        return b"".join(line.partition(b" ")[2] for line in last)[-most_bytes:].decode(errors="replace")

    def lines(self, follow: bool, last: int | None, since: str) -> Iterator[bytes]:
        with open(self._path, "rb") as file:
            there = [line for line in file if line[:30].decode() >= since]
            yield from there if last is None else there[len(there) - min(last, len(there)) :]
            while follow:
                over = self._over.is_set()  # before the last look
                yield from file
                if over:
                    return
                time.sleep(0.05)


class Logs:
    """Of all containers of a node."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._open: dict[tuple[str, str, str], Log] = {}

    def open(self, namespace: str, pod: str, container: str) -> Log:
        log = Log(self._folder / namespace / pod / f"{container}.log")
        self._open[namespace, pod, container] = log
        return log

    def find(self, namespace: str, pod: str, container: str) -> Log | None:
        return self._open.get((namespace, pod, container))

    def forget(self, namespace: str, pod: str) -> None:
        for key in [key for key in self._open if key[:2] == (namespace, pod)]:
            del self._open[key]
        shutil.rmtree(self._folder / namespace / pod, ignore_errors=True)


def serve_logs(logs: Logs, certificate: Path, key: Path) -> int:
    """GET /containerLogs/NAMESPACE/POD/CONTAINER, in threads of its own; the port."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            url = urlsplit(self.path)
            query = {name: values[-1] for name, values in parse_qs(url.query).items()}
            parts = url.path.strip("/").split("/")
            log = logs.find(*parts[1:]) if len(parts) == 4 and parts[0] == "containerLogs" else None
            if log is None:
                self.send_error(404, "no such container on this node")
                return
            self.send_response(200)
            self.send_header("Content-Type", "text/plain")
            self.end_headers()
            last = int(query["tailLines"]) if "tailLines" in query else None
            try:
                for line in log.lines(query.get("follow") == "true", last, query.get("sinceTime", "")):
                    self.wfile.write(line if query.get("timestamps") == "true" else line.partition(b" ")[2])
                    self.wfile.flush()
            except OSError:  # the reader has left
                return

        def log_message(self, *_: object) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(certificate, key)
    server.socket = tls.wrap_socket(server.socket, server_side=True)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return int(server.server_address[1])
