"""A history that is longer than one answer, as somebody learns it who has none of it, or another branch."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.swarm import chain as of_chain
from shoal.swarm.chain import Chain
from shoal.swarm.round_record import Certified, Kind, Record

SWARM = "f" * 64
PEER = "a" * 64
START = Record("start", 0, (), ())
PIECE = 10


def chain() -> Chain:
    return Chain(SWARM, START, lambda peer, text, signature: True)


def grow(it: Chain, rounds: int, by: str = PEER, kind: Kind = "round") -> None:
    for _ in range(rounds):
        members = it.head.members or (PEER,)
        record = Record(kind if it.head.members else "branch", it.head.round + 1, (it.head.hash,), members, by=by)
        it.add(Certified(record, 0, dict.fromkeys(members, "")))
        it.move(record.hash)


def learn(knows: Chain, learns: Chain) -> int:
    """In how many answers; as a node does it (talk.py)."""
    last: list[str] = []
    for answers in range(1, 1000):
        before = last
        new = knows.since([*last, *learns.locator()], PIECE)
        for one in new:
            learns.add(one)
        last = [one.record.hash for one in new[-1:]]
        if knows.head.hash in learns:
            return answers
        assert last not in ([], before), "nothing new, and not all of it"
    raise AssertionError


def test_who_comes_late_learns_all_of_it_piece_by_piece() -> None:
    old, new = chain(), chain()
    grow(old, 257)
    assert learn(old, new) == 26
    assert new.is_ancestor(START.hash, old.head.hash)


def test_two_long_branches_learn_each_other_and_what_is_new_in_them_in_one_answer() -> None:
    a = chain()
    grow(a, 40)
    b = chain()
    learn(a, b)
    b.move(a.head.hash)
    grow(a, 83, by="b" * 64)
    grow(b, 31, by="c" * 64)
    assert 9 <= learn(a, b) <= 12
    assert 4 <= learn(b, a) <= 7
    assert a.common(a.head.hash, b.head.hash).round == 40
    grow(a, 5, by="b" * 64)
    assert learn(a, b) == 1


def test_a_line_without_an_end_is_not_read_into_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What stands before it is kept; the rest is learned from the others again."""
    file = tmp_path / "chain.jsonl"
    first = Chain(SWARM, START, lambda *_: True, file)
    grow(first, 3)
    whole = file.read_bytes()
    monkeypatch.setattr(of_chain, "MOST_BYTES", 2000)
    with open(file, "ab") as f:
        f.write(b"[" * 5000 + b"\n" + whole.splitlines(keepends=True)[-1])
    assert Chain(SWARM, START, lambda *_: True, file).head == first.head
    assert file.read_bytes() == whole
