"""Every position is used once and accounted for, through losses, goodbyes, branches and merges."""

from __future__ import annotations

import random

import pytest

from shoal.swarm import sample_ledger as accounts
from shoal.swarm.offer import in_a_round
from shoal.swarm.ranges import Ranges, count, first, minus, union, within
from shoal.swarm.round_record import Ledger, Part

PEERS = tuple(f"{i:064x}" for i in range(6))
TOTAL = 20_000


class Branch:
    """A history that uses samples, and remembers which."""

    def __init__(self, ledger: Ledger, members: tuple[str, ...], used: Ranges = ()) -> None:
        self.ledger, self.members, self.used = ledger, members, used

    def round(self, rng: random.Random, absent: set[str] | frozenset[str] = frozenset()) -> None:
        took = []
        for peer in self.members:
            if peer not in absent and rng.random() < 0.8:
                mine = first(self.ledger.held.get(peer, ()), rng.randrange(1, 120))
                if mine:
                    took.append(Part(peer, 1, "0" * 64, 1, 1, 1, mine, targets=1))
        for part in took:
            assert not within([part.used[0]], self.used)
            self.used = union(self.used, part.used)
        self.ledger = accounts.settle(self.ledger, took)
        self.ledger = accounts.hand_out(self.ledger, {peer: rng.randrange(50, 400) for peer in self.members}, TOTAL)

    def check(self) -> None:
        """Used, free, held and set aside are all there is, and nothing is two of these."""
        ledger = self.ledger
        parts = [self.used, ledger.free, *ledger.held.values(), *ledger.away.values()]
        assert sum(map(count, parts)) == count(union(*parts)) == ledger.cursor
        assert count(self.used) == ledger.done


def lose(branch: Branch, lost: set[str], smaller: bool = False) -> Branch:
    ledger = accounts.lose(branch.ledger, branch.members, lost, TOTAL, smaller)
    return Branch(ledger, tuple(p for p in branch.members if p not in lost), branch.used)


@pytest.mark.parametrize("seed", range(30))
def test_two_branches_never_use_a_sample_twice_and_lose_none(seed: int) -> None:
    rng = random.Random(seed)
    main = Branch(accounts.hand_out(Ledger(), dict.fromkeys(PEERS, 200), TOTAL), PEERS)
    for _ in range(3):
        for _ in range(rng.randrange(1, 8)):
            main.round(rng)
            main.check()
        cut = set(rng.sample(main.members, rng.randrange(1, len(main.members))))
        b = lose(main, set(main.members) - cut, smaller=True)
        early = Branch(main.ledger, main.members, main.used)
        for _ in range(rng.randrange(4)):  # the others need a while to notice, and still count on those who are gone
            early.round(rng, absent=cut)
        a = lose(early, cut)
        for branch in (a, b):
            for _ in range(rng.randrange(1, 8)):
                branch.round(rng)
        assert not count(minus(a.used, minus(a.used, minus(b.used, main.used))))
        ledger = accounts.merge(a.ledger, b.ledger, main.members)
        main = Branch(ledger, main.members, union(a.used, b.used))
        main.check()
        assert not ledger.lanes
    while main.ledger.done < TOTAL:
        main.round(rng)
        main.check()
    assert main.used == ((0, TOTAL),)


def test_what_a_lost_peer_held_is_used_by_others_once_it_is_forgotten_or_says_goodbye() -> None:
    rng = random.Random(1)
    main = Branch(accounts.hand_out(Ledger(), dict.fromkeys(PEERS, 200), TOTAL), PEERS)
    main = lose(main, {PEERS[0]})
    assert count(main.ledger.away[PEERS[0]]) >= 200
    for _ in range(5):
        main.round(rng)
    main.ledger = accounts.go(main.ledger, [PEERS[0], PEERS[1]])
    main.members = main.members[1:]
    assert PEERS[0] not in main.ledger.away
    assert not main.ledger.lanes
    while main.ledger.done < TOTAL:
        main.round(rng)
    assert main.used == ((0, TOTAL),)


def test_who_comes_back_goes_on_with_what_it_had() -> None:
    main = Branch(accounts.hand_out(Ledger(), dict.fromkeys(PEERS, 200), TOTAL), PEERS)
    had = main.ledger.held[PEERS[2]]
    main = lose(main, {PEERS[2]})
    ledger = accounts.come(main.ledger, [PEERS[2]])
    assert within(had, ledger.held[PEERS[2]])
    assert not ledger.lanes


def test_after_a_short_round_a_peer_is_given_samples_for_a_whole_one() -> None:
    assert in_a_round(100, 10.0, 10.0) == 100
    assert in_a_round(100, 2.5, 10.0) == 400
    assert in_a_round(100, 20.0, 10.0) == 100, "its steps are longer than a round"
    assert in_a_round(10, 0.1, 10.0) == in_a_round(10, 0.0, 10.0) == 80, "one step tells little"
