"""Agreement in simulated time: cuts, crashes, loss and late messages, thousands of them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shoal.fleet.swarm.record import BadRecord, Certified, Record, ack_text
from tests.fleet.swarm.simulator import RULES, SWARM, Sim, name


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
