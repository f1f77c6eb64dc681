"""One member, in this process: what it does about others that are not there any more."""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal.fleet import member as module
from shoal.fleet.epoch import TOKEN_BYTES, Card, Epoch, Fence
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
