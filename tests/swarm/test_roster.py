from __future__ import annotations

import asyncio
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shoal.errors import UsageError
from shoal.net.api import Address, Message, Refused, Unreachable
from shoal.net.identity import Identity, canonical
from shoal.swarm.entries import Entry
from shoal.swarm.gossip import NEWS
from shoal.swarm.invite import SKEW_S, Admission, Invitation
from shoal.swarm.roster import Roster
from shoal.swarm.signed import Forged
from tests.net.ends import Journal
from tests.swarm.peers import DAY_S, SWARM, agree, swarm, until


def roster(
    organiser: Identity, admission: Admission | None = None, me: Identity | None = None, **options: Any
) -> Roster:
    me = me or Identity.new()
    return Roster(SWARM, organiser.id, me, admission or Admission.direct(SWARM, me.id, organiser), **options)


def invitation(organiser: Identity, expires_in_s: float = DAY_S) -> Invitation:
    address = Address(("http://relay.example:3340",), ("10.0.0.7:4433",), ("10.0.0.7:4434",))
    return Invitation.new(SWARM, organiser, "demo", time.time() + expires_in_s, {Identity.new().id: address})


def newcomer(organiser: Identity, invited: Invitation, **options: Any) -> Roster:
    me = Identity.new()
    return roster(organiser, invited.admit(me.id), me, **options)


def test_an_invitation_is_one_line_that_survives_being_pasted_and_notices_damage() -> None:
    invited = invitation(Identity.new())
    line = invited.line()
    assert "\n" not in line
    assert len(line) < 800
    assert Invitation.read(f"  {line[:70]}\n   {line[70:]} \n") == invited
    assert invited.key.secret.hex() not in repr(invited)
    for broken in (line[:-9], line[:60] + "AAAA" + line[64:], "shoal1", "shoal1" + "A" * 9000, "https://example.org"):
        with pytest.raises(UsageError):
            Invitation.read(broken)


def test_a_line_with_a_ticket_that_the_organiser_has_not_signed_is_refused() -> None:
    invited = invitation(Identity.new())
    longer = replace(invited, ticket=replace(invited.ticket, expires=invited.ticket.expires + 1))
    with pytest.raises(UsageError):
        Invitation.read(longer.line())


def test_any_member_can_check_a_newcomer_and_nobody_else_gets_in() -> None:
    organiser, told = Identity.new(), Journal()
    invited = invitation(organiser)
    member = newcomer(organiser, invited, event=told)
    friend, stranger = newcomer(organiser, invited), newcomer(Identity.new(), invitation(Identity.new()))
    assert member.admit(friend.me.id, friend.proof())
    assert friend.me.id in member
    assert not member.admit(stranger.me.id, stranger.proof())
    assert not member.admit(stranger.me.id, friend.proof())  # somebody else's proof
    assert not member.admit(stranger.me.id, b"\xff" * 100)
    assert not member.admit(stranger.me.id, b"")
    assert not member.admit(stranger.me.id, b"[" * 8000)
    assert len(told.of("refused")) == 5
    assert all(e["peer"] == stranger.me.id for e in told.of("refused"))


@pytest.mark.parametrize(
    "change",
    [
        {"name": "somebody"},
        {"seq": 9},
        {"left": True},
        {"address": {"relays": [], "direct": [], "tcp": ["6.6.6.6:1"]}},
        {"peer": "ab" * 32},
        {"admission": {}},
        {"signature": "AAAA"},
        {"seq": True},
        {"name": "x" * 10_000},
        {"address": {"tcp": ["x"] * 1000}},
    ],
)
def test_a_forged_record_is_not_kept(change: dict[str, object]) -> None:
    organiser, told = Identity.new(), Journal()
    member, other = roster(organiser, event=told), roster(organiser)
    true = json.loads(other.proof())
    assert not member.take([{**true, **change}]).news
    assert len(told.of("refused")) == 1
    assert member.members() == [member.me.id]
    assert member.take([true]).fresh == (other.me.id,)


def test_an_older_record_is_refused_and_a_newer_one_taken() -> None:
    organiser, told = Identity.new(), Journal()
    member, other = roster(organiser, event=told), roster(organiser)
    old = json.loads(other.proof())
    other.announce(Address(tcp=("10.0.0.9:1",)))
    assert member.take([json.loads(other.proof())]).news
    assert not member.take([old], sender="ab" * 32).news
    assert [e["peer"] for e in told.of("refused")] == ["ab" * 32]
    entry = member.entry(other.me.id)
    assert entry is not None
    assert entry.address.tcp == ("10.0.0.9:1",)


def test_an_expired_invitation_lets_nobody_in_but_those_who_came_in_time_stay_and_are_believed() -> None:
    organiser, now = Identity.new(), [time.time()]
    invited = invitation(organiser, expires_in_s=100)
    first = roster(organiser, clock=lambda: now[0])
    early = newcomer(organiser, invited)
    assert first.admit(early.me.id, early.proof())
    now[0] += 100 + SKEW_S / 2  # clocks differ: still good
    slow = newcomer(organiser, invited)
    assert first.admit(slow.me.id, slow.proof())
    now[0] += SKEW_S
    late = newcomer(organiser, invited)
    assert not first.admit(late.me.id, late.proof())
    # A member that comes much later, by another invitation, believes the witness.
    fresh = newcomer(organiser, invitation(organiser), clock=lambda: now[0] + 30 * DAY_S)
    entries = [e.to_json() for e in first.newer({})]
    fresh.take(list(reversed(entries)))
    assert {first.me.id, early.me.id, slow.me.id} <= set(fresh.members())
    # The stranger's own word for himself is none, nor that of another stranger.
    other = newcomer(organiser, invited)
    other.take([json.loads(late.proof())])
    forged = other.entry(late.me.id)
    assert forged is not None
    assert forged.witness is not None
    assert not fresh.take([forged.to_json()]).news


def test_a_revoked_peer_and_a_revoked_invitation_are_out_and_stay_out() -> None:
    organiser = Identity.new()
    invited = invitation(organiser)
    member, a, b, c = roster(organiser), *(newcomer(organiser, invited) for _ in range(3))
    for one in (a, b):
        assert member.admit(one.me.id, one.proof())
    with pytest.raises(ValueError):
        member.revoke(Identity.new(), "peer", a.me.id)
    assert member.revoke(organiser, "peer", a.me.id).gone == (a.me.id,)
    assert not member.admit(a.me.id, a.proof())
    assert member.revoke(organiser, "invite", invited.id, keep=[b.me.id]).gone == ()
    assert member.admit(b.me.id, b.proof())
    assert not member.admit(c.me.id, c.proof())
    # It spreads as data: another member takes it, a forged one is refused.
    other = roster(organiser)
    other.take([json.loads(a.proof())])
    revocations = [r.to_json() for r in member.revoked().values()]
    assert not other.take([], [{**revocations[0], "id": b.me.id}]).news
    assert other.take([json.loads(b.proof())], revocations).gone == (a.me.id,)
    assert b.me.id in other
    a.take([], revocations)
    assert a.expelled
    assert not b.expelled


def test_a_restart_needs_no_invitation_and_numbers_go_on(tmp_path: Path) -> None:
    organiser, file = Identity.new(), tmp_path / "roster.json"
    me = Identity.new()
    first = roster(organiser, invitation(organiser).admit(me.id), me, file=file)
    other = roster(organiser)
    first.take([json.loads(other.proof())])
    first.announce(Address(tcp=("10.0.0.1:1",)), name="attic")
    again = Roster.load(file, me)
    assert again.members() == first.members()
    assert again.name(me.id) == "attic"
    assert file.stat().st_mode & 0o077 == 0
    # A copy of an old folder: others have newer records of us, so ours get a higher number.
    old = file.read_bytes()
    again.announce(Address(tcp=("10.0.0.2:2",)))
    file.write_bytes(old)
    behind = Roster.load(file, me)
    behind.take([json.loads(again.proof())])
    assert json.loads(behind.proof())["seq"] > json.loads(again.proof())["seq"]


def test_a_record_is_signed_for_one_swarm() -> None:
    organiser, me = Identity.new(), Identity.new()
    here = roster(organiser, me=me)
    with pytest.raises(Forged):
        Entry.of(json.loads(here.proof()), "77" * 32, organiser.id)


def test_peers_find_each_other_through_any_member_and_the_first_may_go() -> None:
    async def play() -> None:
        async with swarm() as s:
            first = await s.first()
            invited = s.invite(first)
            second = await s.join(invited)
            third = await s.join(invited)
            await until(lambda: agree(first, second, third))
            s.members.remove(first)
            await first.stop()
            # The same invitation, written anew by a member that is no organiser.
            fourth = await s.join(invited.at({third.id: third.endpoint.address()}))
            await until(lambda: fourth.endpoint.links().get(second.id) is not None)
            await until(lambda: set(second.roster.members()) == {m.id for m in (first, second, third, fourth)})
            await until(lambda: fourth.endpoint.links()[second.id].way is not None)

    asyncio.run(play())


def test_an_uninvited_key_and_forged_gossip_get_nowhere() -> None:
    async def play() -> None:
        async with swarm() as s:
            first = await s.first()
            stranger = Identity.new()
            other = await s.start(stranger, Admission.direct(SWARM, stranger.id, Identity.new()))
            other.endpoint.know(first.id, first.endpoint.address())
            with pytest.raises((Unreachable, Refused)):
                await other.endpoint.ask(first.id, Message("roster.ask", {}), timeout_s=1.0)
            await until(first.refused)
            assert first.roster.members() == [first.id]
            # A member that sends forged news is found out, and what it made up goes no further.
            member = await s.join(s.invite(first))
            await until(lambda: agree(first, member))
            made_up = [{**json.loads(member.roster.proof()), "peer": "cd" * 32}] * 3
            for body in (canonical({"entries": made_up}), b"\xff\xfe", b"[]", canonical({"entries": 7})):
                member.endpoint.tell(first.id, Message(NEWS, {}, body))
            await until(lambda: sum("forged" in why for why in first.refused()) >= 3)
            assert len(first.roster.members()) == 2

    asyncio.run(play())


def test_revoking_closes_links_everywhere() -> None:
    async def play() -> None:
        async with swarm() as s:
            first = await s.first()
            invited = s.invite(first)
            a, b, bad = [await s.join(invited) for _ in range(3)]
            await until(lambda: agree(first, a, b, bad))
            first.roster.revoke(s.organiser, "peer", bad.id)
            await until(lambda: agree(first, a, b))
            await until(lambda: all(link.way is None for link in bad.endpoint.links().values()))
            await asyncio.sleep(0.5)  # it tries again, and is refused
            assert all(bad.id not in m.roster for m in (first, a, b))
            assert all(link.way is None for link in bad.endpoint.links().values())

    asyncio.run(play())


def test_a_wrong_clock_keeps_nobody_out_and_old_members_can_let_others_in() -> None:
    async def play() -> None:
        async with swarm() as s:
            first = await s.first()
            second = await s.join(s.invite(first))
            third = await s.join(s.invite(first))
            await until(lambda: agree(first, second, third))
            s.members.remove(first)
            await first.stop()
            # A year ahead: by its own clock everybody's invitation has expired, and it has not heard of the first,
            # who has witnessed the others. It believes its invitation, then goes by the others' time.
            odd = await s.join(s.invite(second), clock=lambda: time.time() + 365 * DAY_S)
            await until(lambda: {second.id, third.id} <= set(odd.roster.members()))
            await until(lambda: odd.gossip.skew_s is not None)
            assert odd.gossip.skew_s == pytest.approx(-365 * DAY_S, abs=5)
            assert odd.journal.of("clock")
            fourth = await s.join(s.invite(odd))
            await until(lambda: fourth.id in odd.roster and fourth.id in third.roster)

    asyncio.run(play())
