"""One member that lies: the others go on, within a bounded time, whatever it says."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest

from shoal.swarm.messages import MERGE_TERM
from shoal.swarm.round_record import Record
from shoal.swarm.terms import Agreed, Vote
from tests.swarm.liar import Liar
from tests.swarm.simulator import RULES, Sim, name

WITHIN_S = 120.0  # of virtual time: six times as long as a leader that decides nothing is borne


@pytest.mark.parametrize("seed", range(int(os.environ.get("SHOAL_FUZZ", 6))))  # more of them by the variable
def test_whatever_one_member_says_the_others_agree_on_further_rounds(seed: int) -> None:
    peers = (4, 5, 7)[seed % 3]
    liar = name(seed * 3 % peers)  # the first of them too, who leads
    sim = Sim(peers, seed, replace(RULES, branches=seed % 2 == 0), frozenset({liar}))
    if seed % 4 != 3:
        sim.agree(20)
    Liar(sim, liar)
    for _ in range(2):
        before = max(p.chain.head.round for p in sim.honest.values())
        sim.run(WITHIN_S)
        rounds = {p.chain.head.round for p in sim.honest.values()}
        assert min(rounds) > before, f"no round within {WITHIN_S} s: {rounds} after {before}"
    sim.on_tick.clear()
    sim.kill(liar)
    head = sim.agree(WITHIN_S)
    assert sum(r.kind == "round" for r in next(iter(sim.honest.values())).chain.past(head.hash)) > 3
    assert sim.refused[liar] > 0


def test_a_query_with_a_huge_term_moves_nobody() -> None:
    liar = name(3)
    sim = Sim(5, 1, RULES, frozenset({liar}))
    sim.agree(20)
    made = Liar(sim, liar, per_tick=0)
    for victim in sim.honest:
        order = sim.peers[victim].decider.order()
        term = MERGE_TERM - MERGE_TERM % len(order) + order.index(liar)
        for said in (term, term % len(order) + len(order)):  # out of range, and one that could be
            votes = made._votes(sim.peers[victim].chain.head.hash, said)
            fields = {"head": sim.peers[victim].chain.head.hash, "term": said, "votes": votes}
            sim._send(liar, replace(made.query(victim), fields=fields))
    before = sim.agree(5).round
    sim.run(12)
    assert all(p.chain.head.round > before + 1 and p.decider.term == 0 for p in sim.honest.values())
    assert sim.refused[liar] >= 4


def test_a_term_that_was_poisoned_and_written_down_is_not_believed_after_a_restart() -> None:
    sim = Sim(5, 2, RULES)
    head = sim.agree(20)
    other = Record("round", head.round + 1, (head.hash,), head.members, by=name(2))
    forged = {name(i): Vote(MERGE_TERM + 7, "00") for i in range(5)}
    for i, me in enumerate(list(sim.disks)):
        sim.kill(me)
        sim.disks[me]["agreed"] = Agreed(MERGE_TERM + 7, forged if i % 2 else None, (MERGE_TERM + i, other), None)
        sim.restart(me)
    sim.run(60)
    assert sim.agree(30).round > head.round + 3


def test_a_branch_of_one_member_moves_nobody_who_hears_the_others() -> None:
    liar = name(4)
    sim = Sim(5, 3, RULES, frozenset({liar}))
    sim.agree(20)
    made = Liar(sim, liar, per_tick=0)
    for _ in range(30):
        for victim in sim.honest:
            sim._send(liar, made.commit(victim))
        sim.run(2)
        assert all(set(p.chain.head.members) >= set(sim.honest) for p in sim.honest.values())
    rounds = [r for r in sim.peers[name(0)].chain.past(sim.peers[name(0)].chain.head.hash) if r.kind == "round"]
    assert len(rounds) > 5


def test_a_leader_cannot_make_itself_most_of_the_members() -> None:
    sim = Sim(5, 4, RULES, frozenset({name(0)}))
    sim.agree(20)
    leader = sim.peers[name(0)]
    leader.decider._next_members = lambda here, now: (name(0), name(1))  # type: ignore[method-assign]
    for _ in range(20):
        sim.run(5)
        assert all(len(set(p.chain.head.members) & set(sim.honest)) >= 3 for p in sim.honest.values())
