"""Whoever gives its state away goes on training meanwhile, also when the one that asked for it is stopped or gone."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from shoal import wire
from shoal.islands import donate
from shoal.islands.donate import Donor, receive
from tests.patience import Stopwatch

STATE = {"w": torch.arange(1 << 20, dtype=torch.float32)}  # more than a socket holds


def never() -> None:
    raise AssertionError


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    a, b = socket.socketpair()
    yield a, b
    a.close()
    b.close()


def test_a_newcomer_gets_the_state_its_notes_and_what_came_after(pair: tuple[socket.socket, socket.socket]) -> None:
    donor, loaded = Donor(), []
    donor.asked(pair[0], {"key": "k"})
    assert donor.wanted() == ["k"]
    donor.begin("k", 7, STATE, {"step": 6})
    donor.log(7, torch.ones(3), [{"a": 1}])
    donor.finish(["k"], 8)
    mine = {"w": torch.zeros(1 << 20)}

    def note(step: int, notes: dict[str, Any]) -> None:
        loaded.append((step, notes, bool(torch.equal(mine["w"], STATE["w"]))))

    (entry,) = receive(pair[1], mine, note, lambda: None, never)
    assert loaded == [(7, {"step": 6}, True)]
    assert (entry.step, entry.said) == (7, [{"a": 1}])


def test_one_that_does_not_read_is_given_up_and_training_goes_on(
    pair: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(donate, "AHEAD_BYTES", 0)
    monkeypatch.setattr(donate, "SLOW_S", 0.3)
    donor = Donor()
    donor.asked(pair[0], {"key": "k"})
    donor.begin("k", 0, STATE, {})
    for step in range(donate.AHEAD):
        donor.log(step, torch.zeros(8), [])
    watch = Stopwatch()
    for step in range(donate.AHEAD, 20):
        donor.log(step, torch.zeros(8), [])
    assert watch.quiet_s() < donate.STALL_S / 4  # once, and then it is given up
    with pytest.raises(wire.Broken):
        list(receive(pair[1], {"w": torch.zeros(1 << 20)}, lambda step, notes: None, lambda: None, never))


def test_whoever_is_gone_before_it_begins_is_forgotten(pair: tuple[socket.socket, socket.socket]) -> None:
    donor = Donor()
    donor.asked(pair[0], {"key": "k"})
    pair[1].close()
    assert donor.wanted() == []


def test_an_island_that_is_a_member_no_more_gives_nothing_more(pair: tuple[socket.socket, socket.socket]) -> None:
    donor = Donor()
    donor.asked(pair[0], {"key": "k"})
    donor.begin("k", 0, {"w": torch.zeros(4)}, {})
    received = receive(pair[1], {"w": torch.zeros(4)}, lambda step, notes: None, donor.drop, never)
    with pytest.raises(wire.Broken):
        list(received)


def test_the_wait_for_the_donors_next_step_has_no_limit_but_its_end(
    pair: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(donate, "WAIT_S", 0.02)
    monkeypatch.setattr(donate, "STALL_S", 0.05)
    waited = 0

    def waiting() -> None:
        nonlocal waited
        waited += 1
        if waited > 10:  # four times as long as the limit for a byte of the state
            raise wire.Broken("gone")

    with pytest.raises(wire.Broken, match="gone"):
        list(receive(pair[1], {}, lambda step, notes: None, never, waiting))
