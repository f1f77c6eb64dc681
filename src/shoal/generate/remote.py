"""A conversation with a model behind a URL that answers as OpenAI's /v1/chat/completions does.

What a server says is a stranger's: each line, each field and the whole have a largest size, and nothing is followed to
another address.
"""

from __future__ import annotations

import http.client
import json
import ssl
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any
from urllib.parse import urlsplit

from shoal import values
from shoal.errors import TransientError, UsageError
from shoal.generate.chat import Ended, Messages
from shoal.values import BadValue, inside, shown

PATH = "/v1/chat/completions"
MOST_LINE_BYTES = 1 << 20
MOST_ANSWER_BYTES = 64 << 20
MOST_TEXT = 1 << 24
SILENT_S = 600.0  # without a byte: a model may read a long prompt first
_FINISHES = {"length": "after the most tokens that were asked for", "content_filter": "as the server filtered it"}


class There:
    def __init__(self, url: str, settings: dict[str, Any], model: str | None = None, key: str | None = None) -> None:
        """`settings` are what a request has beside its messages, `key` is sent as a bearer token."""
        self._url = urlsplit(url)
        if self._url.scheme not in ("http", "https") or not self._url.hostname:
            raise UsageError(f"{shown(url)} is no URL of a server; write it as http://host:port.")
        if self._url.username or self._url.password:
            raise UsageError("a URL with a password would be written down everywhere; give the key by --key-from NAME.")
        path = self._url.path.rstrip("/")
        self._path = path if path.endswith("/chat/completions") else f"{path.removesuffix('/v1')}{PATH}"
        self._settings, self._key = settings, key
        self.name = model or self._first_model()
        self._finish: str | None = None
        self._cut = False

    def answer(self, messages: Messages, stopped: Callable[[], bool]) -> Iterator[str]:
        """The caller's signal ends a read that waits: `stopped` is looked at between two pieces."""
        self._finish, self._cut = None, True
        asked = {**self._settings, "model": self.name, "messages": list(messages), "stream": True}
        try:
            with closing(self._connection()) as connection:
                connection.request("POST", self._path, json.dumps(asked), self._headers())
                reply = connection.getresponse()
                self._refuse(reply)
                for piece in self._pieces(reply):
                    if stopped():
                        return
                    yield piece
        except (OSError, http.client.HTTPException) as e:
            raise TransientError(f"{self._where} broke off ({shown(str(e) or type(e).__name__)}); ask again.") from None
        except BadValue as e:
            raise TransientError(f"{self._where} answers with something else than a chat completion ({e}).") from None

    def ended(self) -> Ended:
        if self._cut:
            return Ended(False, "before its end")
        return Ended(self._finish not in _FINISHES, _FINISHES.get(self._finish or "", "by the model"))

    @property
    def _where(self) -> str:
        return f"{self._url.scheme}://{self._url.netloc}"

    def _connection(self) -> http.client.HTTPConnection:
        host = self._url.hostname or ""
        try:
            port = self._url.port
        except ValueError:
            raise UsageError(f"{self._where} has a port that is none; write it as http://host:port.") from None
        if self._url.scheme == "https":
            return http.client.HTTPSConnection(host, port, timeout=SILENT_S, context=ssl.create_default_context())
        return http.client.HTTPConnection(host, port, timeout=SILENT_S)

    def _headers(self) -> dict[str, str]:
        bearer = {} if self._key is None else {"Authorization": f"Bearer {self._key}"}
        return {"Content-Type": "application/json", "Accept": "text/event-stream", **bearer}

    def _refuse(self, reply: http.client.HTTPResponse) -> None:
        """What is no answer, in its own words where it has some."""
        if reply.status == 200:
            return
        said = reply.read(1 << 16).decode(errors="replace")
        try:
            body = values.read_object(said.encode())
            error = body.get("error", body.get("detail", ""))
            said = str(error.get("message", "")) if isinstance(error, dict) else str(error)
        except BadValue:
            pass  # a page of a proxy
        kind = UsageError if 300 <= reply.status < 500 and reply.status not in (408, 429) else TransientError
        raise kind(f"{self._where} says {reply.status} to {self._path}: {values.shown(' '.join(said.split())[:200])}.")

    def _pieces(self, reply: http.client.HTTPResponse) -> Iterator[str]:
        if "json" in (reply.getheader("Content-Type") or ""):  # one that does not stream
            data = reply.read(MOST_ANSWER_BYTES + 1)
            yield self._of(values.read_object(data, most_bytes=MOST_ANSWER_BYTES), "message")
            self._cut = False
            return
        size = 0
        while line := reply.readline(MOST_LINE_BYTES + 1):
            size += len(line)
            if len(line) > MOST_LINE_BYTES or size > MOST_ANSWER_BYTES:
                raise BadValue(f"more than {MOST_ANSWER_BYTES >> 20} MiB, or {MOST_LINE_BYTES >> 20} in a line")
            if not line.startswith(b"data:"):
                continue
            if (said := line[5:].strip()) == b"[DONE]":
                self._cut = False
                return
            if piece := self._of(values.read_object(said), "delta"):
                yield piece
        self._cut = self._finish is None

    def _of(self, said: dict[str, Any], name: str) -> str:
        """The text of one event."""
        if said.get("error"):
            error = said["error"]
            raise BadValue(f"an error, {shown(error.get('message', error) if isinstance(error, dict) else error)}")
        with inside("choices"):
            choices = values.items(said.get("choices", []), 100)
            if not choices:  # the count of tokens comes alone
                return ""
            choice = values.fields_of(choices[0])
            if choice.get("finish_reason") is not None:
                self._finish = values.short(choice["finish_reason"])
            with inside(name):
                content = values.fields_of(choice.get(name) or {}).get("content")
                return "" if content is None else values.text(content, MOST_TEXT)

    def _first_model(self) -> str:
        """What the server calls the model that it lists first."""
        path = self._path.removesuffix("/chat/completions") + "/models"
        try:
            with closing(self._connection()) as connection:
                connection.request("GET", path, headers=self._headers())
                reply = connection.getresponse()
                self._refuse(reply)
                listed = values.items(values.read_object(reply.read(MOST_LINE_BYTES + 1)).get("data"), 10_000)
                if not listed:
                    raise BadValue("no model")
                return values.short(values.fields_of(listed[0]).get("id"))
        except (OSError, http.client.HTTPException) as e:
            raise TransientError(
                f"{self._where} cannot be reached ({shown(str(e) or type(e).__name__)}); is it up?"
            ) from None
        except BadValue as e:
            raise TransientError(f"{self._where}{path} lists no models ({e}); name one with --model.") from None
