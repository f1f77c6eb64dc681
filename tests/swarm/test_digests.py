"""Who is wrong when peers tell different weights: most are right; where there are no most, a rule that all follow."""

from __future__ import annotations

from shoal.swarm.chain import Chain
from shoal.swarm.digests import Digests, Split, Told
from shoal.swarm.round_record import Certified, Kind, Record
from tests.swarm.simulator import START, SWARM, name

A, B, C, D = (name(i) for i in range(4))
PEERS = {"A": A, "B": B, "C": C, "D": D}


def history(members: str, rounds: int = 4) -> tuple[Digests, list[str]]:
    """Digests of a history of peers, each of whom is a letter, and the names of its records."""
    chain, head = Chain(SWARM, START, lambda peer, text, signature: True), START
    everybody = tuple(PEERS[letter] for letter in members)
    names = [START.hash]
    for number in range(1, rounds + 1):
        kind: Kind = "round" if head.members else "branch"
        head = Record(kind, number, (head.hash,), everybody, by=everybody[0])
        chain.add(Certified(head, 0, dict.fromkeys(everybody, "")))
        chain.move(head.hash)
        names.append(head.hash)
    return Digests(chain), names


def tell(digests: Digests, record: str, twice: bool = False, life: int = 0, **told: str) -> None:
    for letter, digest in told.items():
        digests.hear(PEERS[letter], record, Told(digest, life, twice))


def split_of(digests: Digests, me: str) -> Split:
    found = digests.split(me)
    assert found is not None
    return found


def test_more_than_half_are_most_and_half_with_the_first_member_is_not() -> None:
    digests, names = history("ABCD")
    tell(digests, names[4], A="x", B="x", C="y", D="y")
    assert digests.most(names[4]) is None
    assert digests.differs({names[4]: "y"}) is None
    tell(digests, names[4], D="x")
    assert digests.most(names[4]) == digests.agreed(names[4]) == "x"
    assert digests.differs({names[4]: "y"}) == 4
    assert digests.differs({names[4]: "x"}) is None


def test_one_alone_agrees_with_itself() -> None:
    digests, names = history("A")
    tell(digests, names[4], A="x")
    assert digests.most(names[4]) == "x"
    assert digests.split(A) is None


def test_two_that_differ_are_a_split_and_the_first_member_counts_once_both_insist() -> None:
    digests, names = history("AB")
    tell(digests, names[4], A="x", B="y")
    for me in (A, B):
        split = split_of(digests, me)
        assert (split.round, split.sides, split.twice) == (4, {"x": (A,), "y": (B,)}, False)
    tell(digests, names[4], A="x", twice=True)
    assert not split_of(digests, A).twice
    tell(digests, names[4], B="y", twice=True)
    assert split_of(digests, B).twice
    assert split_of(digests, B).counts == "x"


def test_two_against_two_goes_to_the_half_of_the_first_and_more_peers_go_before_it() -> None:
    digests, names = history("ABCD")
    tell(digests, names[4], A="x", B="y", C="x", D="y")
    assert split_of(digests, D).counts == "x"
    tell(digests, names[4], C="z")
    assert split_of(digests, D).counts == "y"
    tell(digests, names[4], B="v")
    assert split_of(digests, D).counts == "x"


def test_who_has_not_told_yet_is_waited_for_and_is_no_side() -> None:
    digests, names = history("ABC", rounds=4)
    tell(digests, names[4], A="x")
    assert digests.split(A) is None
    tell(digests, names[4], B="y")
    assert digests.split(A) is None, "C may still tell"
    tell(digests, names[2], A="x", B="y")
    assert split_of(digests, A).round == 2, "two records later nobody waits for C"


def test_one_of_three_cannot_win_while_another_is_silent() -> None:
    """A first member that lies, while an honest one is late: it gets no more than when most had to agree."""
    digests, names = history("ABC")
    tell(digests, names[2], A="lie", B="x", twice=True)
    assert split_of(digests, B).counts is None
    tell(digests, names[2], C="x")
    assert digests.split(B) is None
    assert digests.most(names[2]) == "x"


def test_what_was_told_of_a_state_that_was_given_up_counts_no_more() -> None:
    digests, names = history("AB")
    tell(digests, names[3], A="x", B="y")
    assert digests.split(A) is not None
    tell(digests, names[4], A="z")
    tell(digests, names[4], B="z", life=1)
    assert digests.split(A) is None
    assert digests.most(names[4]) == "z"


def test_a_split_of_others_and_words_of_strangers_are_none_of_ours() -> None:
    digests, names = history("AB")
    tell(digests, names[4], A="x", B="y", C="x", D="x")
    assert digests.split(C) is None
    assert digests.most(names[4]) is None
    digests.hear(A, "no record", Told("x"))


def test_what_most_once_told_is_remembered_longer_than_who_told_it() -> None:
    digests, names = history("AB", rounds=40)
    for record in names[1:]:
        tell(digests, record, A=record[:8], B=record[:8])
    assert digests.most(names[2]) is None
    assert digests.agreed(names[2]) == names[2][:8]
