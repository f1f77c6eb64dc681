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

from shoal.islands import member as module
from shoal.islands.epoch import TOKEN_BYTES, Card, Epoch, Fence
from shoal.islands.lines import Server, connect
from shoal.islands.member import Evicted, Member
from tests.patience import Stopwatch

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
def trio(fence: Fence) -> Iterator[list[Member]]:
    """The members of an epoch, which can be reached. The first one has begun."""
    members: list[Member] = []
    token = secrets.token_bytes(TOKEN_BYTES)
    said = {"freeze": Member.asked_to_freeze, "epoch": Member.told_of_epoch, "line": Member.line_from}

    def serve(i: int) -> Server:
        handlers = {what: (lambda sock, said, do=do: do(members[i], sock, said)) for what, do in said.items()}
        return Server(HERE, token, handlers)

    servers = [serve(i) for i in range(3)]
    cards = [Card(f"{i}-aa", i, s.address, (s.address,), "here", os.getpid()) for i, s in enumerate(servers)]
    epoch = Epoch(1, tuple(cards), base=0)
    fence.create(epoch)
    members += [Member(one, token, fence, shards=6) for one in cards]
    members[0].begin(epoch, 0)
    yield members
    for one in [*members, *servers]:
        one.close()


def newest(fence: Fence) -> Epoch:
    found = fence.newest()
    assert found is not None
    return found


def line_of(member: Member, to: Member) -> socket.socket:
    return connect(to.card.control, to._token, {"for": "line", "key": member.card.key})


def test_whoever_is_left_out_is_not_talked_to_any_more(
    trio: list[Member], fence: Fence, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It reads nothing: some day its buffer would be full, and the first member would wait for it for ever."""
    monkeypatch.setattr(module, "SILENT_S", 0.5)
    first, second, _ = trio
    with line_of(second, to=first) as stopped:
        watch = Stopwatch()
        while stopped.recv(4096):  # beats, and then the end
            assert watch.quiet_s() < 20
    assert second.card.key not in newest(fence).keys


def test_what_a_member_keeps_does_not_grow_with_the_steps(trio: list[Member], fence: Fence) -> None:
    for member in trio[1:]:
        member.begin(newest(fence), 0)
    with ThreadPoolExecutor(3) as threads:
        for step in range(50):
            for member in trio:
                member.take(step)
            assert all(threads.map(lambda member, step=step: member.hold(1, step), trio))
    assert sum(len(member._holds) for member in trio) <= 3


@pytest.mark.parametrize("seconds", [0.05, 0.5])
def test_of_two_that_cannot_trade_the_dead_one_has_to_go(trio: list[Member], fence: Fence, seconds: float) -> None:
    """Who lost it may be heard of before the end of its own line is: then both still seem to be there."""
    first, dead, other = trio
    other.begin(newest(fence), 0)
    line = line_of(dead, to=first)
    with ThreadPoolExecutor(1) as threads:
        over = threads.submit(other.missing, 1, dead.card.key, "reset")
        time.sleep(seconds)  # as the kernel may deliver the one before the other
        line.close()
        over.result(20)
    assert newest(fence).keys == [first.card.key, other.card.key]


def test_of_two_that_cannot_trade_and_live_the_later_one_has_to_go(trio: list[Member], fence: Fence) -> None:
    first, second, other = trio
    for member in (second, other):
        member.begin(newest(fence), 0)
    with pytest.raises(Evicted):
        other.missing(1, second.card.key, "reset")
    assert newest(fence).keys == [first.card.key, second.card.key]


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


def test_the_only_one_with_the_state_leaves_when_others_have_it(trio: list[Member], fence: Fence) -> None:
    """Until then it is asked to take another step, in which it hands the state over."""
    first, *others = trio
    for member in others:
        member.begin(newest(fence), 0, behind=True)
    assert first.leave() is None
    assert first.card.key in newest(fence).keys
    for member in others:
        member.caught_up(0)
    assert first.leave() is True
    assert newest(fence).keys == [member.card.key for member in others]


def test_who_was_a_member_does_not_come_back_by_an_old_word(trio: list[Member], fence: Fence) -> None:
    """It said that it was ready, was taken in, and was stopped; the word comes once more."""
    first, gone, other = trio
    other.begin(newest(fence), 0)
    first.ready(gone.card)
    with first._lock:
        first._suspect(gone.card.key, "closed")
    with ThreadPoolExecutor(1) as threads:
        assert threads.submit(first.take, 0).result(20)
        watch = Stopwatch()
        while gone.card.key in newest(fence).keys:
            assert watch.quiet_s() < 20
            time.sleep(0.02)
    first.ready(gone.card)
    time.sleep(3 * module.BEAT_S)
    assert newest(fence).keys == [first.card.key, other.card.key]


def test_who_dies_before_it_has_called_is_missed_at_once(fence: Fence, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed between its admission and its first word, it has no connection whose end could tell of it."""
    monkeypatch.setattr(module, "SILENT_S", 3600.0)
    epoch = Epoch(1, (card(0), card(1)), base=0)  # nobody listens at the address of the second
    fence.create(epoch)
    first = Member(epoch.members[0], secrets.token_bytes(TOKEN_BYTES), fence, shards=4)
    first.begin(epoch, 0)
    try:
        until = time.monotonic() + 60
        while newest(fence).number == 1:
            assert time.monotonic() < until
            time.sleep(0.02)
    finally:
        first.close()
    assert newest(fence).left == {epoch.members[1].key: "has closed the connection"}
