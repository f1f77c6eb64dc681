"""A keeper gives a node's memory to those who know the run's token, and takes in what is right to the last byte."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import random
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.checkpoint.nodes import TOKEN, Left, Node, leave, nodes
from tests.patience import Stopwatch, limit

from shoal import wire
from shoal.checkpoint.fields import layout_fields
from shoal.checkpoint.manifest import seal
from shoal.checkpoint.memory import neighbour
from shoal.checkpoint.memory.generations import Here, seal_extra
from shoal.checkpoint.memory.keeper import start
from shoal.checkpoint.memory.neighbour import Peer
from shoal.checkpoint.memory.ram import forget, hold, memory_folder
from shoal.checkpoint.names import Name
from shoal.checkpoint.part import encode_part, pack
from shoal.checkpoint.rows import Layout
from shoal.errors import TransientError
from shoal.ways import reachable_address

A = Name(10, 1)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The memory of a node."""
    monkeypatch.setenv("SHOAL_MEMORY", str(tmp_path / "ram"))
    held = hold(memory_folder(tmp_path / "run", 0))
    yield held.folder
    held.close()


@pytest.fixture
def elsewhere(tmp_path: Path, here: Path) -> Path:
    """Another node, which sends."""
    held = hold(memory_folder(tmp_path / "elsewhere", 1))
    held.close()
    return held.folder


@pytest.fixture
def node(here: Path) -> Iterator[Node]:
    with nodes(here) as (one,):
        yield one


def await_end(process: subprocess.Popen[bytes], within_s: float) -> int:
    return process.wait(within_s)


def read(peer: Peer, left: Left, at: int, count: int) -> bytes:
    data = bytearray(count)
    peer.read_into(left.name, left.part.rank, at, memoryview(data))
    return bytes(data)


def test_what_a_node_has_is_read_by_ranges_and_by_many_at_once(node: Node, here: Path) -> None:
    left = leave(here, A, rank=0, world=1)
    whole = left.path.read_bytes()
    peer = node.peer()
    assert {name: (dict(one.ranks), one.extra) for name, one in peer.kept().items()} == {A: ({0: len(whole)}, True)}
    assert peer.part(A, 0) == encode_part(left.part)
    assert peer.extra(A) == seal_extra(b'{"step": 10}')
    ranges = [(at, min(517, len(whole) - at)) for at in range(0, len(whole), 517)]
    with ThreadPoolExecutor(8) as pool:
        assert b"".join(pool.map(lambda r: read(peer, left, *r), ranges)) == whole
    with pytest.raises(EOFError):
        read(peer, left, 1, len(whole))
    with pytest.raises(FileNotFoundError):
        peer.part(A, 1)
    with pytest.raises(FileNotFoundError):
        peer.part(Name(11, 1), 0)
    assert read(peer, left, 0, 8) == whole[:8], "a refusal has broken the connection"
    for sock in peer._idle:
        sock.shutdown(socket.SHUT_RDWR)  # as a keeper does with those that ask nothing for long
    assert read(peer, left, 0, 8) == whole[:8]
    peer.close()


def test_a_copy_arrives_byte_for_byte_and_counts_at_once(node: Node, here: Path, elsewhere: Path) -> None:
    for rank in (0, 1):
        left = leave(elsewhere, A, rank, world=2)
        left.send(node.address)
        assert read(node.peer(), left, 0, left.part.file.bytes) == left.path.read_bytes()
        assert node.peer().part(A, rank) == encode_part(left.part)
    assert node.peer().extra(A) == seal_extra(b'{"step": 10}')
    assert sorted(os.listdir(here / "copies")) == [str(A)]


def test_the_two_newest_copies_of_each_rank_stay_and_a_later_start_is_newer(node: Node, elsewhere: Path) -> None:
    def send(step: int, term: int, rank: int = 1) -> None:
        leave(elsewhere, Name(step, term), rank, world=2).send(node.address)

    def kept(rank: int) -> list[Name]:
        return sorted(name for name, one in node.peer().kept().items() if rank in one.ranks)

    send(5, 1, rank=0)
    for step in (10, 20, 30):
        send(step, 1)
    assert (kept(0), kept(1)) == ([Name(5, 1)], [Name(20, 1), Name(30, 1)])
    send(15, 2)  # went on from step 10
    assert kept(1) == [Name(15, 2), Name(30, 1)]
    send(16, 2)
    assert kept(1) == [Name(15, 2), Name(16, 2)]
    assert kept(0) == [], "what an earlier start left stays for ever when its rank is no more"


def test_pages_are_not_kept_for_ranks_that_are_no_more(node: Node, here: Path, elsewhere: Path) -> None:
    for step in (10, 20, 30):
        for rank in (0, 1):
            leave(elsewhere, Name(step, 1), rank, world=2).send(node.address)
    assert sorted(path.name for path in (here / "copies").glob(".*")) == [".spare-00000", ".spare-00001"]
    for step in (40, 50):
        leave(elsewhere, Name(step, 2), 0, world=1).send(node.address)
    assert [path.name for path in (here / "copies").glob(".*")] == [".spare-00000"]


def test_a_copy_that_is_not_what_its_checksums_say_is_not_kept(node: Node, here: Path, elsewhere: Path) -> None:
    left = leave(elsewhere, A, rank=0, world=1)
    whole, part = left.path.read_bytes(), encode_part(left.part)
    fields = json.loads(part)
    file, layout = fields["file"], left.part.layout

    def changed(**changes: Any) -> bytes:
        head = json.dumps({**fields, **changes, "xxh3_128": None}).encode().removesuffix(b', "xxh3_128": null}')
        return head + seal(head)

    def with_layout(text: str) -> bytes:
        return changed(layout=base64.b64encode(zlib.compress(text.encode())).decode())

    def with_shape(*shape: int) -> bytes:
        return changed(layout=pack(Layout({"model.w": replace(layout.tensors["model.w"], shape=shape)})))

    rng = random.Random(3)
    for _ in range(20):
        damaged = bytearray(whole)
        damaged[rng.randrange(len(whole))] ^= 1 << rng.randrange(8)
        with pytest.raises(TransientError, match="not what its checksums say"):
            neighbour.replicate(node.address, TOKEN, A, 0, 1, memoryview(damaged), part, b"{}")
    wrong = {
        "another rank": changed(rank=1),
        "another world": changed(world=2),
        "not JSON": b"{" + seal(b"{"),
        "not sealed": part.replace(b'"world":1', b'"world":2'),
        "a row too few": with_shape(3, 300),
        "a row too many": with_shape(5, 300),
        "no tensor": changed(layout=pack(Layout({}))),
        "a layout that is none": changed(layout="bm90aGluZw=="),
        "a layout that is cut off": changed(layout=fields["layout"][:-8]),
        "not the members of a layout": with_layout("{}"),
        "a rank that is none": with_layout(
            json.dumps(layout_fields(layout)).replace('"ranks": {"first": 0', '"ranks": {"first": 1')
        ),
        "an unknown dtype": with_layout(json.dumps(layout_fields(layout)).replace("F32", "F3")),
        "a checksum too few": changed(file=file | {"blocks": ""}),
        "a header that is longer than the file": changed(file=file | {"header_bytes": file["bytes"] + 8}),
        "no number": changed(file=file | {"header_bytes": "8"}),
        "blocks of nothing": changed(block_bytes=0),
    }
    for what, table in wrong.items():
        with pytest.raises(TransientError, match="the part of rank 0 cannot be used") as e:
            neighbour.replicate(node.address, TOKEN, A, 0, 1, memoryview(whole), table, b"{}")
        assert ("checksum does not match" in str(e.value)) == (what == "not sealed"), e.value
        assert not node.peer().kept(), what
    assert list((here / "copies").glob("step-*")) == []
    left.send(node.address)
    assert list(node.peer().kept()) == [A]


def test_a_sender_that_dies_half_way_leaves_nothing(node: Node, here: Path, elsewhere: Path) -> None:
    left = leave(elsewhere, A, rank=0, world=1)
    table = encode_part(left.part)
    sock = neighbour.connect(node.address, TOKEN)
    about = {"step": A.step, "term": A.term, "rank": 0, "world": 1, "bytes": left.part.file.bytes}
    wire.send(sock, {"do": "copy", "part": len(table), "extra": 0, **about})
    sock.sendall(table)
    assert wire.receive_message(sock, 4096) == {}
    sock.sendall(left.path.read_bytes()[:1000])
    assert list((here / "copies").glob(".in-*")), "it should have begun"
    with pytest.raises(TransientError, match="is just arriving"):
        left.send(node.address)  # one at a time, so that memory is bounded
    sock.close()
    watch = Stopwatch()
    while list((here / "copies").glob(".in-*")) and watch.quiet_s() < 10:
        time.sleep(0.01)
    assert os.listdir(here / "copies") == [".spare-00000"], "its pages are for the next one"
    left.send(node.address)
    assert os.listdir(here / "copies") == [str(A)]


def test_a_copy_for_which_there_is_no_room_is_refused_in_a_sentence(
    tiny_disk: Path, elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.checkpoint.nodes.COLUMNS", 150_000)  # 2.4 MB a copy, on 8 MiB
    folder = tiny_disk / "shoal" / "run" / "node-0"
    hold(folder).close()
    with nodes(folder) as (node,):

        def send(step: int, rank: int) -> None:
            leave(elsewhere, Name(step, 1), rank, world=2).send(node.address)

        def files() -> int:
            return sum(path.stat().st_size > 1 << 20 for path in folder.rglob("*"))

        for step in (10, 20, 30, 40, 50):
            send(step, 0)
            assert files() <= 3, "two copies, and the pages of the next"
        assert sorted(node.peer().kept()) == [Name(40, 1), Name(50, 1)]
        with pytest.raises(TransientError, match=r"no copy on another node: .* has no room for \d+ bytes of rank 1"):
            send(50, 1)
        assert sorted(node.peer().kept()) == [Name(40, 1), Name(50, 1)]
        assert files() == 3

    shutil.rmtree(folder)
    hold(folder).close()
    (tiny_disk / "ballast").write_bytes(bytes(2 << 20))
    with nodes(folder) as (node,):
        for step in (10, 20, 30):  # no room for three: the older of two gives its pages
            send(step, 0)
        assert sorted(node.peer().kept()) == [Name(20, 1), Name(30, 1)]
        assert files() == 2


# Strangers, and friends who talk nonsense


def raw(node: Node) -> socket.socket:
    return socket.create_connection(wire.address_of(node.address), 10)


def say(sock: socket.socket, words: bytes) -> None:
    """And nothing more. The keeper may have hung up before the end."""
    with contextlib.suppress(OSError):
        sock.sendall(words)
        sock.shutdown(socket.SHUT_WR)


def everything(sock: socket.socket) -> bytes:
    said = b""
    with contextlib.suppress(ConnectionResetError):  # closed with words of ours unread
        while data := sock.recv(1 << 16):
            said += data
    return said


def test_who_does_not_know_the_token_learns_nothing_and_breaks_nothing(
    node: Node, here: Path, elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = leave(here, A, rank=0, world=1)
    with pytest.raises(OSError, match="does not answer"):
        Peer(node.address, secrets.token_bytes(32)).kept()
    with pytest.raises(TransientError, match="no copy on another node"):
        leave(elsewhere, A, 1, 2).send(node.address, token=bytes(32))
    rng = random.Random(1)
    for i in range(60):
        with raw(node) as sock:
            noise = rng.randbytes(rng.choice([0, 1, 63, 64, 65, 5000]))
            if i % 3 == 0:
                noise = b"GET /rank-00000.safetensors HTTP/1.1\r\n\r\n".ljust(64)
            say(sock, noise)
            assert len(everything(sock)) <= 48, "more than the greeting"
    with raw(node) as mirror:  # the keeper's own words, thrown back at it
        hello = mirror.recv(48)
        mirror.sendall(hello[16:] + hello[16:])
        assert everything(mirror) == b""
    assert list(node.peer().kept()) == [A]
    assert read(node.peer(), left, 0, 8) == left.path.read_bytes()[:8]
    assert sorted(os.listdir(here / "copies")) == []


def test_an_impostor_is_not_told_anything_and_not_believed(elsewhere: Path) -> None:
    """Whoever took over a keeper's port does not know the token: he gets no byte of a snapshot."""
    left = leave(elsewhere, A, rank=0, world=1)
    heard = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            sock, _ = listener.accept()
            with sock:
                sock.settimeout(limit(10))
                sock.sendall(b"shoal keeper 1\n\0" + bytes(32))
                said = sock.recv(4096)
                sock.sendall(said[32:])  # its own proof, as if it were the keeper's
                heard.append(said + everything(sock))

        with ThreadPoolExecutor(1) as pool:
            done = pool.submit(answer)
            with pytest.raises(TransientError, match="does not know the token"):
                left.send(wire.text_of(listener.getsockname()))
            done.result()
    assert len(heard[0]) == 64
    assert TOKEN not in heard[0]


def test_many_strangers_who_say_nothing_do_not_keep_friends_out(
    node: Node, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave(here, A, rank=0, world=1)
    silent = [raw(node) for _ in range(80)]
    watch = Stopwatch()
    try:
        while True:
            try:
                assert list(node.peer().kept()) == [A]
                break
            except OSError:
                assert watch.quiet_s() < 20, "the strangers keep the door shut"
                time.sleep(0.2)
    finally:
        for sock in silent:
            sock.close()


def test_nonsense_from_a_friend_ends_his_connection_at_most(node: Node, here: Path) -> None:
    left = leave(here, A, rank=0, world=1)
    secret = here.parent / "secret"
    secret.write_bytes(b"not yours")
    rng = random.Random(2)
    good: dict[str, Any] = {"do": "read", "step": 10, "term": 1, "rank": 0, "at": 0, "count": 4}
    odd: list[Any] = [
        -1, 1 << 70, 1.5, "0", None, True, [], {}, "../../secret", "step-00000010-term-1/../../secret", float("nan"),
    ]  # fmt: skip
    messages: list[bytes] = [json.dumps(good | {key: rng.choice(odd)}).encode() for key in good for _ in range(12)]
    messages += [json.dumps({"do": do, **dict.fromkeys(("step", "term", "rank", "world"), value)}).encode()
                 for do in ("part", "extra", "copy", "leave", "..") for value in odd]  # fmt: skip
    messages += [b"", b"[]", b"null", b"{", b"\xff" * 9, b"[" * 4000, b'{"do":"copy"}', rng.randbytes(300)]
    for message in messages:
        with neighbour.connect(node.address, TOKEN) as sock:
            say(sock, len(message).to_bytes(4, "big") + message)
            assert b"not yours" not in everything(sock)
    for length in (1 << 13, 1 << 31, (1 << 32) - 1):
        with neighbour.connect(node.address, TOKEN) as sock:
            sock.sendall(length.to_bytes(4, "big") + b"{")
            assert everything(sock) == b""
    huge = {"do": "copy", "step": 1, "term": 1, "rank": 1, "world": 2, "bytes": 1 << 50, "part": 1 << 50, "extra": 0}
    with neighbour.connect(node.address, TOKEN) as sock:
        wire.send(sock, huge)
        assert everything(sock) == b""
    assert read(node.peer(), left, 0, 8) == left.path.read_bytes()[:8]
    assert os.listdir(here / "copies") == []
    assert node.keeper.process.poll() is None


# How it lives


def test_the_token_is_neither_in_its_arguments_nor_in_its_environment(node: Node) -> None:
    proc = Path("/proc") / str(node.keeper.process.pid)
    seen = (proc / "cmdline").read_bytes() + (proc / "environ").read_bytes()
    assert TOKEN.hex().encode() not in seen
    assert TOKEN not in seen


def test_it_binds_to_loopback_unless_told_otherwise(node: Node) -> None:
    assert node.address.startswith("127.0.0.1:")
    assert reachable_address("127.0.0.1") == "127.0.0.1"


STARTER = """
import sys, time
from pathlib import Path
from shoal.checkpoint.memory.keeper import start
started = start(Path(sys.argv[1]), bytes(range(32)), linger_s=float(sys.argv[2]))
print(started.address, started.process.pid, flush=True)
time.sleep(600)
"""


def test_it_serves_on_when_its_starter_is_killed_and_leaves_after_a_while(here: Path) -> None:
    leave(here, A, rank=0, world=1)
    starter = subprocess.Popen([sys.executable, "-c", STARTER, str(here), "1.5"], stdout=subprocess.PIPE)
    assert starter.stdout is not None
    address, pid = starter.stdout.readline().decode().split()
    starter.kill()
    starter.wait()
    starter.stdout.close()
    killed_at = time.monotonic()
    while time.monotonic() < killed_at + 2.5:  # asked now and then, it stays longer than it would alone
        assert list(Peer(address, TOKEN).kept()) == [A]
        time.sleep(0.3)
    watch = Stopwatch()
    while _alive(int(pid)):
        assert watch.quiet_s() < 20, "it has not left"
        time.sleep(0.1)


def test_another_one_over_the_same_folder_replaces_it(node: Node, here: Path) -> None:
    leave(here, A, rank=0, world=1)
    with nodes(here) as (second,):
        assert await_end(node.keeper.process, 10) == 0
        assert list(second.peer().kept()) == [A]


def test_it_leaves_when_the_run_has_ended_in_order(node: Node, here: Path) -> None:
    forget(here)
    assert await_end(node.keeper.process, 10) == 0
    assert not here.exists()


def test_one_that_cannot_start_says_why(here: Path) -> None:
    with pytest.raises(TransientError, match=r"did not start: .*"):
        start(here, TOKEN, host="192.0.2.1")  # an address of nobody


@pytest.mark.parametrize("act", [Node.lose, lambda node: node.keeper.process.send_signal(signal.SIGSTOP)])
def test_a_copy_to_a_dead_or_frozen_keeper_fails_in_bounded_time(
    act: Callable[[Node], None], node: Node, elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire, "GREETING_S", 1.0)
    left = leave(elsewhere, A, rank=0, world=1)
    act(node)
    watch = Stopwatch()
    with pytest.raises(
        TransientError, match=r"the snapshot of step 10 has no copy on another node: the keeper at .*\)\."
    ):
        left.send(node.address)
    assert watch.quiet_s() < 10
    if node.keeper.process.poll() is None:
        node.keeper.process.send_signal(signal.SIGCONT)


def test_here_and_over_the_wire_are_the_same(node: Node, here: Path) -> None:
    for rank in (0, 1):
        leave(here, A, rank, world=2)
    assert node.peer().kept() == Here(here).kept()


def _alive(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False
