"""`shoal chat`: in a real terminal, and with a real server."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from shoal.cli.main import main
from shoal.errors import ShoalError, TransientError, UsageError
from shoal.generate.chat import Here
from shoal.generate.opened import Wanted, of_folder
from shoal.generate.remote import There
from shoal.generate.request import Sampling
from tests.generate.folders import folder

Captured = pytest.CaptureFixture[str]
HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder(tmp_path_factory.mktemp("model") / "small", context=256)


def here(model: Path, **changes: Any) -> Here:
    sampling = Sampling(**{"max_tokens": 12, "temperature": 0.0, **changes})
    return Here(of_folder(model, Wanted("cpu", special=True)), sampling, [], exact=False)


def typed(monkeypatch: pytest.MonkeyPatch, *lines: str) -> None:
    monkeypatch.setattr(sys, "stdin", StringIO("".join(line + "\n" for line in lines)))


def test_an_answer_is_that_of_the_template_and_the_second_turn_computes_what_is_new(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    partner = here(model)
    computed: list[int] = []
    runner = partner._engine._runner
    prefill = runner.prefill
    monkeypatch.setattr(
        runner, "prefill", lambda seat, part, *rest: computed.append(len(part)) or prefill(seat, part, *rest)
    )
    said = "".join(partner.answer(HELLO, lambda: False))
    whole = sum(computed)
    assert whole == len(partner.template.tokens(partner._opened.tokenizer, HELLO))
    assert "max-tokens" in partner.ended().why
    computed.clear()
    again = [*HELLO, {"role": "assistant", "content": said}, {"role": "user", "content": "more"}]
    list(partner.answer(again, lambda: False))
    assert sum(computed) < len(partner.template.tokens(partner._opened.tokenizer, again)) - whole // 2


def test_a_stopped_answer_leaves_the_engine_free(model: Path) -> None:
    partner, looked = here(model, max_tokens=200), iter([False, False, False])
    list(partner.answer(HELLO, lambda: next(looked, True)))
    assert partner.ended().why == "as it was stopped"
    assert not partner._engine.busy
    assert list(partner.answer(HELLO, lambda: False))


def test_a_full_context_is_said(model: Path) -> None:
    partner = here(model, max_tokens=10_000, seed=1)
    with pytest.raises(UsageError, match="256: /reset begins anew"):
        list(partner.answer([{"role": "user", "content": "long " * 100}], lambda: False))
    list(partner.answer(HELLO, lambda: False))
    assert "context of 256 tokens is full" in partner.ended().why or partner.ended().whole


def test_commands_and_what_is_saved(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    file = tmp_path / "chat.jsonl"
    typed(
        monkeypatch,
        "hi",
        "/system Be kind.",
        f"/save {file}",
        f"/save {file}",
        "/reset",
        "/nope",
        "/help",
        "/quit",
        "no",
    )
    assert main(["chat", str(model), "--max-tokens", "5", "--temperature", "0", "--device", "cpu"]) == 0
    out, said = capsys.readouterr()
    (saved,) = [json.loads(line) for line in file.read_text().splitlines()]
    assert [one["role"] for one in saved["messages"]] == ["system", "user", "assistant"]
    assert saved["messages"][2]["content"] in out
    for words in ("after 5 tokens", "is there already", "forgotten", "there is no /nope"):
        assert words in said
    assert "/reset" in out


def test_a_model_without_a_template_is_said_to_get_plain_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    typed(monkeypatch, "hi")
    assert main(["chat", str(folder(tmp_path / "bare", template=None)), "--max-tokens", "3", "--device", "cpu"]) == 0
    assert "brings no chat template: it sees plain turns" in capsys.readouterr().err


class Terminal:
    """A program under a real pty."""

    def __init__(self, *words: str) -> None:
        self._fd, theirs = pty.openpty()
        environment = {**os.environ, "TERM": "dumb", "PYTHONUNBUFFERED": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "shoal", "chat", *words], stdin=theirs, stdout=theirs, stderr=theirs,
            env=environment, start_new_session=True,
        )  # fmt: skip
        os.close(theirs)
        self.seen = ""

    def until(self, pattern: str) -> str:
        """What came, up to where that is seen."""
        while not (found := re.search(pattern, self.seen)):
            ready, _, _ = select.select([self._fd], [], [], 240)
            assert ready, self.seen
            data = b""
            with suppress(OSError):  # the other side is closed
                data = os.read(self._fd, 65536)
            assert data, f"it ended: {self.seen}"
            self.seen += data.decode(errors="replace")
        before, self.seen = self.seen[: found.end()], self.seen[found.end() :]
        return before

    def type(self, text: str) -> None:
        os.write(self._fd, text.encode())

    def interrupt(self) -> None:
        self._process.send_signal(signal.SIGINT)

    def code(self) -> int:
        return self._process.wait(240)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._fd)


@contextmanager
def terminal(*words: str) -> Iterator[Terminal]:
    made = Terminal(*words)
    try:
        yield made
    finally:
        made.close()


@contextmanager
def server(
    *events: bytes, kind: str = "text/event-stream", status: int = 200, hold: bool = False
) -> Iterator[tuple[str, list[Any]]]:
    """Answers every question with the same bytes; with `hold` it then says nothing more until it is closed."""
    asked: list[Any] = []
    closing = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._say(200, "application/json", [b'{"data": [{"id": "the-model"}]}'])

        def do_POST(self) -> None:
            asked.append(
                (self.path, dict(self.headers), json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            )
            self._say(status, kind, list(events))
            if hold:
                closing.wait(240)

        def _say(self, status: int, kind: str, parts: list[bytes]) -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.end_headers()
            for part in parts:
                self.wfile.write(part)
                self.wfile.flush()

        def log_message(self, *_: object) -> None:
            pass

    made = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    made.daemon_threads = True
    thread = threading.Thread(target=made.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{made.server_address[1]}", asked
    finally:
        closing.set()
        made.shutdown()
        made.server_close()
        thread.join()


def event(text: str | None = None, finish: str | None = None) -> bytes:
    choice = {"index": 0, "delta": {} if text is None else {"content": text}, "finish_reason": finish}
    return b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"


def test_a_terminal_shows_what_comes_and_obeys_nothing_in_it() -> None:
    """Against a server, so that it is known what comes. Ctrl-C ends an answer that hangs, and not the chat."""
    with server(event("Hel"), event("lo \x1b]0;title\x07\x1b[31m"), hold=True) as (url, asked), terminal(url) as screen:
        screen.until("talking with the-model.*\r\n> ")
        screen.type("first\n")
        shown = screen.until(r"Hello \\x1b\]0;title\\x07\\x1b\[31m")
        assert "\x1b]0" not in shown
        screen.interrupt()
        screen.until(r"ended before its end\.\r\n> ")
        screen.interrupt()
        screen.until("/quit ends the chat")
        screen.type("/help\n")
        screen.until("/save FILE")
        screen.type("/quit\n")
        assert screen.code() == 0
    assert asked[0][2]["messages"] == [{"role": "user", "content": "first"}]


@pytest.mark.slow
def test_a_terminal_with_a_model_here(model: Path) -> None:
    with terminal(str(model), "--device", "cpu", "--temperature", "1") as screen:
        screen.until("talking with small.*\r\n> ")
        screen.type("first\n")
        screen.interrupt()
        screen.until(r"shoal: the answer ended .*\r\n> |> $")
        screen.type("\x04")
        assert screen.code() == 0


def test_a_server_is_asked_as_openai_is_and_history_goes_along(
    monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.setenv("SOME_KEY", "secret")
    typed(monkeypatch, "one", "two")
    with server(b": ping\n\n", event("Hi"), event(), event(" there", None), event(None, "stop"), DONE) as (url, asked):
        words = ["--system", "Be kind.", "--top-p", "0.5", "--stop", "X", "--key-from", "SOME_KEY", "--max-tokens", "9"]
        assert main(["chat", f"{url}/v1", *words]) == 0
    assert capsys.readouterr().out == "Hi there\nHi there\n"
    (path, headers, body), (_, _, second) = asked
    assert path == "/v1/chat/completions"
    assert headers["Authorization"] == "Bearer secret"
    roles = ["system", "user", "assistant", "user"]
    assert [one["role"] for one in second["messages"]] == roles
    assert body.pop("messages") == [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "one"}]
    sampling = {"temperature": 0.8, "top_p": 0.5, "stop": ["X"], "max_tokens": 9}
    assert body == {"model": "the-model", "stream": True, **sampling}


def test_a_server_that_does_not_stream_is_understood() -> None:
    body = json.dumps({"choices": [{"message": {"content": "whole"}, "finish_reason": "length"}]}).encode()
    with server(body, kind="application/json") as (url, _):
        partner = There(url, {})
        assert list(partner.answer(HELLO, lambda: False)) == ["whole"]
        assert not partner.ended().whole


HOSTILE = {
    "no json": [b"data: {\n\n"],
    "a list": [b"data: [1]\n\n"],
    "an error": [b'data: {"error": {"message": "out of \\u001b[31m memory"}}\n\n'],
    "choices that are none": [b'data: {"choices": 3}\n\n'],
    "a number for a text": [b'data: {"choices": [{"delta": {"content": 5}}]}\n\n'],
    "half a character": [b'data: {"choices": [{"delta": {"content": "\\ud800"}}]}\n\n'],
    "a line without end": [b"data: " + b"x" * (3 << 20)],
    "deep": [b"data: " + b"[" * 100_000 + b"\n\n"],
}


@pytest.mark.parametrize("name", HOSTILE)
def test_what_is_no_answer_is_one_sentence(name: str) -> None:
    with server(*HOSTILE[name]) as (url, _), pytest.raises(TransientError, match="something else than a chat") as said:
        list(There(url, {}, model="m").answer(HELLO, lambda: False))
    assert "\x1b" not in str(said.value)
    assert len(str(said.value)) < 300


def test_an_answer_that_breaks_off_is_said_to() -> None:
    with server(event("a")) as (url, _):
        partner = There(url, {}, model="m")
        assert list(partner.answer(HELLO, lambda: False)) == ["a"]
        assert partner.ended().why == "before its end"


@pytest.mark.parametrize(
    ("status", "body", "why"),
    [
        (401, b'{"error": {"message": "bad key \\u001b[0m"}}', "says 401 to /v1/chat/completions: 'bad key"),
        (302, b"moved", "says 302"),
        (503, b"<html>busy</html>", "says 503"),
    ],
)
def test_a_refusal_is_told_in_its_own_words(status: int, body: bytes, why: str) -> None:
    with server(body, status=status, kind="text/html") as (url, _), pytest.raises(ShoalError) as said:
        list(There(url, {}, model="m").answer(HELLO, lambda: False))
    assert why in str(said.value)
    assert "\x1b" not in str(said.value)


@pytest.mark.parametrize(
    ("words", "code", "why"),
    [
        (["http://"], 2, "no URL of a server"),
        (["ftp://x"], 2, "no URL of a server"),
        (["http://me:secret@host"], 2, "--key-from"),
        (["http://127.0.0.1:1"], 75, "cannot be reached"),
        (["http://127.0.0.1:99999"], 2, "port that is none"),
        (["http://x", "--step", "3"], 2, "--step is for a model that is opened here"),
        (["http://x", "--key-from", "SURELY_NOT_SET"], 2, "SURELY_NOT_SET, which is not set"),
        (["no-such-run"], 2, "there is no run 'no-such-run'"),
        (["no-such-run", "--model", "x"], 2, "--model is for a URL"),
        (["x", "--temperature", "-1"], 2, "--temperature is -1.0"),
    ],
)
def test_wrong_usage_is_one_sentence(words: list[str], code: int, why: str, tmp_path: Path, capsys: Captured) -> None:
    assert main(["chat", *words, "--workspace", str(tmp_path)]) == code
    said = capsys.readouterr().err
    assert why in said
    assert "secret" not in said
    assert said.count("\n") == 1
