"""The Kubernetes API as the tests need it: JSON over HTTPS with a token, and watches. Standard library only."""

from __future__ import annotations

import http.client
import json
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode, urlsplit

from tests.patience import limit

STRATEGIC = "application/strategic-merge-patch+json"
MERGE = "application/merge-patch+json"
Object = dict[str, Any]


class ApiError(Exception):
    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"{status}: {message}")
        self.status = status


class Api:
    """One connection a thread."""

    def __init__(self, url: str, ca: Path, token: str) -> None:
        self._host = urlsplit(url).netloc
        self._token = token
        self._tls = ssl.create_default_context(cafile=str(ca))
        self._of_thread = threading.local()

    def get(self, path: str, **query: str) -> Object:
        return self._json("GET", path, query)

    def items(self, path: str, **query: str) -> list[Object]:
        found: list[Object] = self.get(path, **query)["items"]
        return found

    def create(self, path: str, body: Object) -> Object:
        return self._json("POST", path, {}, body)

    def patch(self, path: str, body: Object, kind: str = STRATEGIC) -> Object:
        return self._json("PATCH", path, {}, body, kind)

    def delete(self, path: str, **options: Any) -> Object:
        return self._json("DELETE", path, {}, {"kind": "DeleteOptions", "apiVersion": "v1", **options})

    def text(self, path: str, **query: str) -> str:
        return self._request("GET", path, query, None, "").decode()

    def watch(self, path: str, timeout_s: float = 60, **query: str) -> Iterator[tuple[str, Object]]:
        """(ADDED | MODIFIED | DELETED, object) from what there was a moment ago until `timeout_s` have passed.

        resourceVersion 0: what the server has at hand will do; it then need not catch up first, which on a busy machine
        it may fail to do in time.
        """
        asked = {"watch": "true", "timeoutSeconds": str(int(timeout_s)), "resourceVersion": "0", **query}
        connection = self._connect()
        try:
            connection.request("GET", f"{path}?{urlencode(asked)}", headers=self._headers())
            answer = connection.getresponse()
            if answer.status != 200:
                raise ApiError(answer.status, answer.read().decode(errors="replace"))
            while line := answer.readline():
                event = json.loads(line)
                if event["type"] == "ERROR":
                    raise ApiError(event["object"].get("code", 500), event["object"].get("message", ""))
                yield event["type"], event["object"]
        finally:
            connection.close()

    def until(self, path: str, done: Callable[[Object], bool], timeout_s: float = 60) -> Object:
        """The object as soon as `done` says so, by watching it."""
        deadline, last = time.monotonic() + limit(timeout_s), None
        folder, _, name = path.rpartition("/")
        while (left := deadline - time.monotonic()) > 0:
            for kind, last in self.watch(folder, timeout_s=max(left, 1), fieldSelector=f"metadata.name={name}"):
                if kind != "DELETED" and done(last):
                    return last
        status = json.dumps((last or {}).get("status"), indent=1)
        raise TimeoutError(f"{path} was not as awaited within {timeout_s:g} s; its status: {status}")

    def _json(
        self, method: str, path: str, query: dict[str, str], body: Object | None = None, kind: str = ""
    ) -> Object:
        answer: Object = json.loads(self._request(method, path, query, body, kind or "application/json"))
        return answer

    def _request(self, method: str, path: str, query: dict[str, str], body: Object | None, kind: str) -> bytes:
        target = f"{path}?{urlencode(query)}" if query else path
        data = None if body is None else json.dumps(body).encode()
        for attempt in (0, 1):
            connection: http.client.HTTPSConnection | None = getattr(self._of_thread, "connection", None)
            if connection is None:
                connection = self._of_thread.connection = self._connect()
            try:
                connection.request(method, target, data, {"Content-Type": kind, **self._headers()})
                answer = connection.getresponse()
                said = answer.read()
            except (http.client.RemoteDisconnected, BrokenPipeError, ConnectionResetError):
                connection.close()
                self._of_thread.connection = None
                if attempt or method == "POST":  # a kept connection may have been closed meanwhile
                    raise
                continue
            except BaseException:
                connection.close()
                self._of_thread.connection = None
                raise
            if answer.status >= 300:
                raise ApiError(answer.status, _message(said))
            return said
        raise AssertionError("unreachable")

    def _connect(self) -> http.client.HTTPSConnection:
        return http.client.HTTPSConnection(self._host, timeout=limit(90), context=self._tls)

    def _headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self._token}", "Accept": "application/json"}


def _message(said: bytes) -> str:
    try:
        return str(json.loads(said)["message"])
    except (ValueError, KeyError):
        return said.decode(errors="replace")


def condition(thing: Object, kind: str) -> Object | None:
    """The condition of that type where it is true."""
    for found in thing.get("status", {}).get("conditions") or []:
        if found["type"] == kind and found["status"] == "True":
            return dict(found)
    return None
