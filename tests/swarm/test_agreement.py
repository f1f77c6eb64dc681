"""Agreement in simulated time: cuts, crashes, loss and late messages, thousands of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from shoal.swarm.messages import Ballot
from shoal.swarm.promises import Promises
from shoal.swarm.round_record import BadRecord, Certified, Kind, Record, ack_text, vote_text
from shoal.swarm.terms import Vote
from shoal.swarm.world import Heard
from tests.swarm.simulator import RULES, START, SWARM, Peer, Sim, name, signature_of


def test_rounds_follow_each_other_and_the_first_member_may_die() -> None:
    sim = Sim(5, 0, RULES)
    first = sim.agree(20)
    sim.run(20)
    assert sim.agree(10).round > first.round + 3
    leader = next(p.decider.leader() for p in sim.peers.values())
    assert leader is not None
    before = max(p.chain.head.round for p in sim.peers.values())
    sim.kill(leader)
    head = sim.agree(20)
    assert leader not in head.members
    assert head.round > before
    sim.restart(leader)
    assert leader in sim.agree(20).members


@pytest.mark.parametrize("seed", range(40))
def test_just_most_members_are_left_and_all_of_their_votes_are_needed(seed: int) -> None:
    """Whoever votes last has a majority by that: the others still have to hear of its vote, whoever leads next."""
    sim = Sim(8, seed, RULES)
    before = sim.agree(20).round
    leader = next(p.decider.leader() for p in sim.peers.values())
    assert leader is not None
    sim.loss = 0.1 * (seed % 3)
    for me in [leader, *sim.rng.sample(sorted(set(sim.peers) - {leader}), 2 - seed % 2)]:
        sim.kill(me)
    assert sim.agree(15).round > before


def test_most_go_on_in_a_cut_and_the_others_branch_and_merge() -> None:
    sim = Sim(8, 1, RULES)
    sim.agree(20)
    small, large = {name(i) for i in range(3)}, {name(i) for i in range(3, 8)}
    sim.cut(small, large)
    sim.run(60)
    kinds = {me: [r.kind for r in p.chain.past(p.chain.head.hash)][:-2] for me, p in sim.peers.items()}
    assert "branch" in kinds[name(0)]
    assert "branch" not in kinds[name(7)]
    assert all(sim.peers[me].chain.head.round > 8 for me in sim.peers)
    sim.heal()
    head = sim.agree(25)
    assert any(r.kind == "merge" for r in sim.peers[name(0)].chain.past(head.hash))


def test_by_the_other_policy_the_smaller_half_waits() -> None:
    sim = Sim(8, 2, replace(RULES, branches=False))
    sim.agree(20)
    small, large = {name(i) for i in range(3)}, {name(i) for i in range(3, 8)}
    sim.cut(small, large)
    sim.run(10)
    waits = sim.peers[name(0)].chain.head.round
    sim.run(60)
    assert sim.peers[name(0)].chain.head.round == waits
    assert sim.peers[name(0)].decider.mode == "wait"
    assert sim.peers[name(7)].chain.head.round > waits + 10
    sim.heal()
    head = sim.agree(25)
    assert not any(r.kind == "merge" for r in sim.peers[name(0)].chain.past(head.hash))


@pytest.mark.parametrize("branches", [True, False])
@pytest.mark.parametrize("seed", range(12))
def test_whatever_happens_no_head_has_two_rounds_and_all_agree_in_the_end(seed: int, branches: bool) -> None:
    sim = Sim(6, seed, replace(RULES, branches=branches))
    everybody = set(sim.disks)
    one_by_one = sorted(everybody)  # whatever the seed of hashes is
    sim.loss = 0.05
    for _ in range(12):
        what = sim.rng.random()
        some = set(sim.rng.sample(one_by_one, sim.rng.randrange(1, 4)))
        if what < 0.3:
            for me in some:
                sim.kill(me)
        elif what < 0.6:
            for me in one_by_one:
                sim.restart(me)
        elif what < 0.85:
            third = set(sim.rng.sample(sorted(everybody - some), 1)) if sim.rng.random() < 0.3 else set()
            sim.cut(some, everybody - some - third, third)
        else:
            sim.heal()
        sim.run(sim.rng.uniform(0.5, 25))
    sim.heal()
    for me in one_by_one:
        sim.restart(me)
    sim.loss = 0.0
    head = sim.agree(120)
    past = {record.hash for record in next(iter(sim.peers.values())).chain.past(head.hash)}
    # What has counted anywhere is in everybody's past: nothing that was decided is lost.
    assert sim.decided <= past


def test_a_record_that_too_few_have_signed_does_not_count() -> None:
    sim = Sim(4, 3, RULES)
    head = sim.agree(20)
    peer = sim.peers[name(0)]
    forged = Record("round", head.round + 1, (head.hash,), head.members, by=name(0))
    text_of = {me: other.sign for me, other in sim.peers.items()}
    text = ack_text(SWARM, forged.hash, 0)
    one = Certified(forged, 0, {name(0): text_of[name(0)](text), name(1): "no signature"})
    with pytest.raises(BadRecord, match="too few"):
        peer.chain.add(one)


@pytest.mark.parametrize("deaf", [0, 4])
def test_one_that_is_heard_and_hears_nothing_does_not_keep_a_swarm_from_beginning(deaf: int) -> None:
    """Nor one that lies, and never signs."""
    sim = Sim(5, 5, RULES)
    sim.losses = {(other, name(deaf)): 1.0 for other in sim.disks}
    sim.run(40)
    others = {me: peer.chain.head for me, peer in sim.peers.items() if me != name(deaf)}
    assert len({head.hash for head in others.values()}) <= 2
    assert all(head.round > 2 and set(head.members) == set(others) for head in others.values())


def test_not_all_have_to_hear_each_other_for_a_swarm_to_begin() -> None:
    sim = Sim(5, 6, RULES)
    for a, b in ((0, 1), (2, 3)):
        sim.losses |= {(name(a), name(b)): 1.0, (name(b), name(a)): 1.0}
    sim.run(60)
    assert all(peer.chain.head.round > 2 for peer in sim.peers.values())


def test_two_groups_that_began_at_once_come_together_also_where_a_half_waits() -> None:
    """All have signed the one, and all but one of them have gone on with the other."""
    sim = Sim(4, 9, replace(RULES, peers=3, branches=False))
    first, *others = sim.peers
    sim.cut({first}, set(others))
    began = Record("branch", 1, (START.hash,), (first, *others), by=first)
    text = ack_text(SWARM, began.hash, 0)
    sim.peers[first].decider.adopt(Certified(began, 0, {me: signature_of(me, text) for me in sim.peers}), sim.now)
    sim.run(15)
    sim.heal()
    assert began.hash in {record.hash for record in sim.peers[first].chain.past(sim.agree(60).hash)}


# One member, told things one by one.


def member(peers: int, me: int = 1, **rules: Any) -> tuple[Sim, Peer, Record]:
    """One of several at a common head, whose first member leads; it hears only what it is told from now on."""
    sim = Sim(peers, 0, replace(RULES, peers=peers, **rules))
    head = sim.agree(20)
    peer = sim.peers[name(me)]
    peer.complete = peer.mergeable = lambda _: True  # type: ignore[method-assign]
    hears(sim, peer, *range(peers))
    assert head.by == name(0)
    return sim, peer, head


def hears(sim: Sim, peer: Peer, *others: int, **said: bool) -> None:
    for i in others:
        if name(i) != peer.me:
            peer.decider.hear(name(i), Heard(sim.now, peer.chain.head.hash, True, **said))


def after(head: Record, *members: int, by: int = 0, kind: Kind = "round", time: float = 0.0) -> Record:
    return Record(kind, head.round + 1, (head.hash,), tuple(map(name, members)), time=time, by=name(by))


def votes(head: Record, term: int, *by: int) -> dict[str, Vote]:
    text = vote_text(SWARM, head.hash, term)
    return {name(i): Vote(term, signature_of(name(i), text)) for i in by}


def test_who_agrees_to_a_branch_still_knows_the_round_that_it_has_agreed_to() -> None:
    sim, peer, head = member(5)
    d, made = peer.decider, after(head, *range(5))
    assert [out.kind for out in d.proposed(name(0), 0, made, {}, sim.now)] == ["ack"]  # by which it may count
    for _ in range(20):  # then most are out of reach for a while
        sim.now += 0.5
        hears(sim, peer, 2)
        d.tick(sim.now)
    assert d.mode == "branch"
    branch = after(head, 1, 2, by=2, kind="branch")
    d._lacking = sim.now - 100  # for so long that the second one may begin it too
    assert [out.kind for out in d.proposed(name(2), 0, branch, {}, sim.now)] == ["ack"]
    hears(sim, peer, 2, 3, 4)  # which comes to nothing: others are back
    [promise] = d.query(name(3), head.hash, 3, votes(head, 3, 2, 3, 4), sim.now)
    assert promise.fields["acked"] == {"term": 0, "record": made.body()}


def test_a_question_that_comes_after_the_proposal_is_not_answered() -> None:
    sim, peer, head = member(5)
    made, behind = after(head, *range(5), by=2), votes(head, 2, 1, 2, 3)
    assert [out.kind for out in peer.decider.proposed(name(2), 2, made, behind, sim.now)] == ["ack"]
    assert peer.decider.query(name(2), head.hash, 2, behind, sim.now) == []


def test_of_what_others_have_agreed_to_only_the_newest_may_have_been_decided() -> None:
    sim, peer, head = member(5)
    d, old, new = peer.decider, after(head, *range(5)), after(head, *range(5), time=1.0)
    peer.complete = lambda record: record != new  # type: ignore[method-assign]
    for who, vote in votes(head, 6, 2, 3, 4).items():
        d.vote(who, Ballot(head.hash, vote), sim.now)
    assert (d.term, d.leader()) == (6, peer.me)
    d.promise(name(2), head.hash, 6, (0, old))
    d.promise(name(3), head.hash, 6, (1, new))
    sim.now += RULES.silent_s  # the two others had time to say what they know
    hears(sim, peer, 2, 3)
    d.tick(sim.now)
    assert d._proposal is None, "it is waited for until it is here"
    peer.complete = lambda record: True  # type: ignore[method-assign]
    d.tick(sim.now)
    assert d._proposal is not None
    assert d._proposal.record == new


def test_what_too_few_can_have_agreed_to_was_not_decided_and_holds_nobody_up() -> None:
    """Once all who are heard have answered, or there was time to."""
    sim, peer, head = member(7)
    d, old = peer.decider, after(head, 0, 2, 3, 4)
    for who, vote in votes(head, 8, 2, 3, 4, 5).items():
        d.vote(who, Ballot(head.hash, vote), sim.now)
    assert (d.term, d.leader()) == (8, peer.me)
    for other in (2, 3, 4):
        d.promise(name(other), head.hash, 8, (0, old) if other == 2 else None)
    d.tick(sim.now)
    assert d._proposal is None, "with three who have not answered it may have been decided"
    d.promise(name(5), head.hash, 8, None)
    sim.now += RULES.silent_s
    hears(sim, peer, 2, 3, 4, 5)
    d.tick(sim.now)
    assert d._proposal is not None
    assert set(map(name, (1, 2, 3, 4, 5))) == set(d._proposal.record.members), "a new one, with all who are here"


def test_what_nobody_has_signatures_enough_for_was_not_decided() -> None:
    """Two of five may have agreed and say nothing; but of those who led until then all have shown that they lack it."""
    sim, peer, head = member(5)
    d, old = peer.decider, after(head, 0, 2)
    for who, vote in votes(head, 6, 2, 3, 4).items():
        d.vote(who, Ballot(head.hash, vote), sim.now)
    assert (d.term, d.leader()) == (6, peer.me)
    branch = after(head, 0, kind="branch")
    for other in (2, 3):
        d.promise(name(other), head.hash, 6, (2, old) if other == 2 else None)
    sim.now += RULES.silent_s
    hears(sim, peer, 2, 3, 4)
    d._promises.of[peer.me] = None
    assert d._promises.perhaps_decided(head.members) == [(2, old)]
    assert not d._nobody_has_it(2, old), "the first one has led too, and nothing is known of it"
    certified = Certified(branch, 0, {name(0): signature_of(name(0), ack_text(SWARM, branch.hash, 0))})
    d.learn(name(0), branch.hash, [certified], sim.now)
    assert d._nobody_has_it(2, old)
    d._promises.of.pop(name(2))
    assert not d._nobody_has_it(2, old), "the third one has led"


def test_promises_of_later_terms_hide_what_was_agreed_to_before() -> None:
    _, _, head = member(5)
    first, second, everybody = after(head, *range(5)), after(head, *range(5), time=1.0), head.members
    promises = Promises()
    promises.of = {name(0): (0, first), name(1): (3, second), name(2): None}
    assert promises.perhaps_decided(everybody) == [
        (3, second),
        (0, first),
    ]  # two have not answered, one has agreed later
    promises.of |= {name(3): None}
    assert promises.perhaps_decided(everybody) == [(0, first)]
    promises.of |= {name(4): None}
    assert promises.perhaps_decided(everybody) == []


@pytest.mark.parametrize("peers", [2, 3, 4])
def test_when_all_leave_at_once_one_is_left_and_no_record_is_without_members(peers: int) -> None:
    sim = Sim(peers, 1, replace(RULES, peers=peers))
    sim.agree(20)
    sim.leaving = set(sim.peers)
    sim.run(30)
    assert not sim.peers
    assert {len(max(disk["records"], key=lambda c: c.record.round).record.members) for disk in sim.disks.values()} == {
        1
    }


def test_what_may_have_been_decided_is_proposed_again_although_a_member_of_it_was_put_out_since() -> None:
    sim, peer, head = member(3)
    d, made = peer.decider, after(head, 0, 1, 2)
    assert [out.kind for out in d.proposed(name(0), 0, made, {}, sim.now)] == ["ack"]
    peer.out.add(name(0))
    d.put_out(name(0))
    with pytest.raises(BadRecord, match="put out"):  # a new one with it in it is refused
        d.proposed(name(0), 0, after(head, 0, 1, 2, time=1.0), {}, sim.now)
    for who, vote in votes(head, 1, 1, 2).items():
        d.vote(who, Ballot(head.hash, vote), sim.now)
    d.promise(name(2), head.hash, 1, (0, made))  # from somebody who has agreed to it too
    assert d._promises.of == {name(2): (0, made)}
    behind = votes(head, 2, 1, 2)
    [promise] = d.query(name(2), head.hash, 2, behind, sim.now)
    assert promise.fields["acked"]["record"] == made.body()
    assert [out.kind for out in d.proposed(name(2), 2, made, behind, sim.now)] == ["ack"]


@pytest.mark.parametrize("branches", [True, False])
def test_where_the_first_of_two_is_put_out_the_other_goes_on(branches: bool) -> None:
    """Alone it is not most of them, and there is nobody to wait for."""
    sim = Sim(2, 0, replace(RULES, peers=2, branches=branches))
    before = sim.agree(20)
    sim.put_out(before.members[0])
    head = sim.agree(20)
    assert head.members == before.members[1:]
    assert head.round > before.round


def test_a_record_of_an_earlier_leader_may_leave_out_most_if_they_were_leaving() -> None:
    """Or nobody agrees to anything at this head again: each leader has to propose it."""
    sim, peer, head = member(5, me=4)
    d, made = peer.decider, after(head, 1, 3)
    hears(sim, peer, 0, 2, leaving=True)
    behind = votes(head, 1, 0, 1, 2)
    assert d.proposed(name(1), 1, made, behind, sim.now) == [], "two of three who stay are too few for a new one"
    sim.now += RULES.stuck_s * 0.6
    hears(sim, peer, 1, 3)
    hears(sim, peer, 0)  # it has changed its mind
    assert [out.kind for out in d.tick(sim.now) if out.kind == "ack"] == ["ack"]


def test_one_that_is_heard_at_a_head_that_it_never_shows_is_not_waited_for() -> None:
    sim, peer, head = member(3)
    d, branch = peer.decider, after(head, 2, by=2, kind="branch")
    counts = Certified(branch, 0, {name(2): signature_of(name(2), ack_text(SWARM, branch.hash, 0))})
    for _ in range(int(RULES.stuck_s) + 4):
        sim.now += 1.0
        d.hear(name(0), Heard(sim.now, "a" * 64))
        d.learn(name(2), branch.hash, [counts], sim.now)
    assert d.here(sim.now) == {name(1)}
    assert d.chain.head == branch, "with the other one that is left"


def test_a_branch_that_was_proposed_does_not_keep_a_leader_from_leading_when_most_are_back() -> None:
    sim, peer, _ = member(5, me=0)
    d = peer.decider
    for _ in range(20):
        sim.now += 0.5
        hears(sim, peer, 1)
        d.tick(sim.now)
    assert d._proposal is not None
    assert d._proposal.record.kind == "branch", "which the other one does not sign"
    hears(sim, peer, 2, 3, 4)
    d.tick(sim.now)
    assert d.mode == "lead"
    assert d._proposal is not None
    assert d._proposal.record.kind == "round"
