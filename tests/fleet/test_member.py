"""One member, in this process: what it does about others that are not there any more."""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from shoal.fleet import member as module
from shoal.fleet.epoch import TOKEN_BYTES, Card, Epoch, Fence
from shoal.fleet.lines import Server, connect
from shoal.fleet.member import Member

HERE = "127.0.0.1"


def card(island: int) -> Card:
    """Of somebody that cannot be reached."""
    with socket.create_server((HERE, 0)) as sock:
        address = f"{HERE}:{sock.getsockname()[1]}"
    return Card(f"{island}-{secrets.token_hex(4)}", island, address, (address,), "here", os.getpid())


@pytest.fixture
def fence(tmp_path: Path) -> Fence:
    return Fence(tmp_path / "fleet")


@pytest.fixture
def newcomer(fence: Fence) -> Iterator[Member]:
    """In its first epoch, of which the other member has died, and still behind."""
    epoch = Epoch(1, (card(0), card(1)), base=5)
    fence.create(epoch)
    member = Member(epoch.members[1], secrets.token_bytes(TOKEN_BYTES), fence, shards=4)
    member.begin(epoch, 3, behind=True)
    yield member
    member.close()


@pytest.fixture
def pair(fence: Fence) -> Iterator[tuple[Member, Member]]:
    """The first member of an epoch, which can be reached, and the other one, which has not begun."""
    token = secrets.token_bytes(TOKEN_BYTES)
    said = {"freeze": Member.asked_to_freeze, "epoch": Member.told_of_epoch, "line": Member.line_from}
    handlers = {what: (lambda sock, said, method=method: method(first, sock, said)) for what, method in said.items()}
    server = Server(HERE, token, handlers)
    epoch = Epoch(1, (Card("0-aa", 0, server.address, (server.address,), "here", os.getpid()), card(1)), base=0)
    fence.create(epoch)
    first, second = (Member(one, token, fence, shards=4) for one in epoch.members)
    first.begin(epoch, 0)
    yield first, second
    second.close()
    first.close()
    server.close()


def test_whoever_is_left_out_is_not_talked_to_any_more(
    pair: tuple[Member, Member], fence: Fence, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It reads nothing: some day its buffer would be full, and the first member would wait for it for ever."""
    monkeypatch.setattr(module, "SILENT_S", 0.5)
    first, second = pair
    with connect(first.card.control, first._token, {"for": "line", "key": second.card.key}) as stopped:
        until = time.monotonic() + 20
        while stopped.recv(4096):  # beats, and then the end
            assert time.monotonic() < until
    newest = fence.newest()
    assert newest is not None
    assert newest.keys == [first.card.key]


def test_what_a_member_keeps_does_not_grow_with_the_steps(pair: tuple[Member, Member], fence: Fence) -> None:
    first, second = pair
    epoch = fence.newest()
    assert epoch is not None
    second.begin(epoch, 0)
    with ThreadPoolExecutor(2) as threads:
        for step in range(50):
            for member in pair:
                member.take(step)
            assert all(threads.map(lambda member, step=step: member.hold(1, step), pair))
    assert len(first._holds) + len(second._holds) <= 2


def test_a_newcomer_whose_donor_has_died_goes_on_alone_once_it_has_the_whole_state(
    newcomer: Member, fence: Fence, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "ANSWER_S", 0.2)
    newcomer._watcher.join(1.0)  # it has noticed by then, and can decide nothing yet
    assert fence.read(2) is None
    newcomer.caught_up(5)
    epoch, shards = newcomer.take(5)
    assert (epoch.number, epoch.keys, epoch.base, shards) == (2, [newcomer.card.key], 5, [0, 1, 2, 3])


def test_a_watcher_that_fails_ends_the_island_instead_of_letting_it_wait_for_ever(
    newcomer: Member, monkeypatch: pytest.MonkeyPatch
) -> None:
    def defect(*_: object) -> None:
        raise AssertionError("more than a step apart")

    monkeypatch.setattr(module, "succeed", defect)
    newcomer.caught_up(5)
    with pytest.raises(RuntimeError, match="watches the other islands has failed"):
        newcomer.hold(1, 5)
