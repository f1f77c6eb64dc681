"""A cut island hears nothing, nobody can reach it, and afterwards everything that was sent arrives."""

from __future__ import annotations

import json
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal.islands import cut
from tests.patience import limit

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="a socket filter is Linux's")


@pytest.fixture
def island(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """This process plays island 2; the file that cuts it off is not there yet."""
    monkeypatch.setattr(cut, "_file", str(tmp_path / "cut.json"))
    yield tmp_path / "cut.json"
    with cut._lock:
        cut._cut.clear()
        cut._filter(cut._sockets, cut=False)


def look(file: Path) -> None:
    """What the thread does every 50 ms."""
    told = cut._told(file, 2)
    with cut._lock:
        (cut._cut.set if told else cut._cut.clear)()
        cut._filter(cut._sockets, told)


def test_while_it_is_cut_nothing_is_heard_and_nobody_comes_in_and_then_all_of_it_arrives(island: Path) -> None:
    server = cut.may_cut(socket.create_server(("127.0.0.1", 0)))
    other = socket.create_connection(server.getsockname())
    mine = cut.may_cut(server.accept()[0])
    mine.settimeout(0.3)
    other.sendall(b"before")
    assert mine.recv(10) == b"before"

    island.write_text(json.dumps({"cut": [2], "until": time.time() + 3600}))
    look(island)
    other.sendall(b"during")
    with pytest.raises(TimeoutError):
        mine.recv(10)
    with pytest.raises(TimeoutError):
        socket.create_connection(server.getsockname(), timeout=0.3)
    with pytest.raises(TimeoutError, match="cut off"):
        cut.refuse_if_cut()

    island.write_text(json.dumps({"cut": [2], "until": time.time() - 1}))
    look(island)
    mine.settimeout(limit(30))  # the kernel sends it again, at ever longer intervals
    assert mine.recv(10) == b"during"
    cut.refuse_if_cut()
    for sock in (server, other, mine):
        sock.close()


def test_others_are_not_cut_and_half_a_file_cuts_nobody(island: Path) -> None:
    for text in ('{"cut": [1], "until": 9e9}', '{"cut": [2]', '{"cut": [2]}', "[]", ""):
        island.write_text(text)
        assert cut._told(island, 2) is False
    assert cut._told(island.with_name("none"), 2) is False
