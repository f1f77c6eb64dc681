"""Connections between islands, with peers that are stopped, strangers, and a system that has no more to give."""

from __future__ import annotations

import contextlib
import os
import resource
import secrets
import signal
import socket
import threading
import time
from pathlib import Path

import pytest

from shoal import wire
from shoal.islands import lines
from shoal.islands.epoch import TOKEN_BYTES
from shoal.islands.lines import Server, answer, ask
from tests.forked import fork
from tests.patience import Stopwatch, limit, until

HERE, TOKEN = "127.0.0.1", secrets.token_bytes(TOKEN_BYTES)
QUESTION = {"for": "status"}


def serving() -> Server:
    return Server(HERE, TOKEN, {"status": lambda sock, said: answer(sock, {"well": True})})


def test_a_question_to_a_peer_that_is_stopped_takes_no_longer_than_it_may() -> None:
    """The kernel still accepts the connection. Whoever asks says nothing to the others meanwhile."""
    with socket.create_server((HERE, 0)) as stopped:
        watch = Stopwatch()
        with pytest.raises(OSError, match="timed out"):
            ask(wire.text_of(stopped.getsockname()), TOKEN, QUESTION, dict, 0.2)
        assert watch.quiet_s() < wire.GREETING_S / 2


def test_strangers_that_say_nothing_do_not_use_up_the_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "MOST_STRANGERS", 8)
    with contextlib.ExitStack() as stack, contextlib.closing(serving()) as server:
        before = threading.active_count()
        strangers = [stack.enter_context(socket.create_connection(wire.address_of(server.address))) for _ in range(40)]
        for stranger in strangers[8:]:
            stranger.settimeout(limit(5.0))
            assert stranger.recv(1) == b""  # sent away
        assert threading.active_count() <= before + 8
        stack.close()
        assert ask_until_answered(server.address) == {"well": True}  # there is room again


def test_a_process_without_free_file_descriptors_answers_again_once_it_has_some(tmp_path: Path) -> None:
    def serve() -> int:
        server = serving()
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
        (tmp_path / "soon").write_text(server.address)
        taken = []
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.dup(0))
        os.rename(tmp_path / "soon", tmp_path / "full")
        while not os.path.exists(tmp_path / "go"):
            time.sleep(0.01)
        for fd in taken:
            os.close(fd)
        return signal.sigwait([signal.SIGTERM])

    pid = fork(serve, tmp_path / "out.txt")
    try:
        address = wait_for(tmp_path / "full").read_text()
        with socket.create_connection(wire.address_of(address), timeout=0.5) as first:
            with contextlib.suppress(TimeoutError):
                first.recv(1)  # the kernel kept a descriptor for it, if the server was listening before all were taken
            with pytest.raises(OSError, match="timed out"):
                ask(address, TOKEN, QUESTION, dict, 0.5)
        (tmp_path / "go").touch()
        assert ask_until_answered(address) == {"well": True}
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def ask_until_answered(address: str) -> dict[str, bool]:
    watch = Stopwatch()
    while True:
        try:
            return ask(address, TOKEN, QUESTION, dict, limit(0.5))
        except OSError:
            assert watch.quiet_s() < 20
            time.sleep(0.05)


def wait_for(path: Path) -> Path:
    until(path.exists)
    return path
