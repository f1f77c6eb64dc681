"""Who may write: a term belongs to one start, whoever races, dies or cannot reach a store; on a disk and on S3."""

from __future__ import annotations

import multiprocessing
import random
import time
from collections.abc import Sequence
from multiprocessing.synchronize import Barrier
from pathlib import Path

import pytest
from tests.patience import limit

from shoal.checkpoint import ledger
from shoal.checkpoint.bucket import Bucket
from shoal.checkpoint.ledger import Claim, Fenced, check_term, claim, ensure_claimed, read
from shoal.checkpoint.names import Name
from shoal.checkpoint.store import Folder, Store, store_of
from shoal.errors import TransientError

RACES = 100


@pytest.fixture(params=["folder", pytest.param("s3", marks=pytest.mark.cluster)])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    return Folder(tmp_path / "store") if request.param == "folder" else Bucket(request.getfixturevalue("s3"))


class Away(Folder):
    """A store that cannot be reached from a certain call on."""

    def __init__(self, root: Path, fails_at: str) -> None:
        super().__init__(root)
        self.fails_at = fails_at

    def _fail(self, call: str) -> None:
        if call == self.fails_at:
            raise TransientError("away")

    def list(self, folder: str = "") -> list[str]:
        self._fail("list, of a ledger with a claim in it" if super().list(folder) else "list")
        return super().list(folder)

    def put(self, name: str, data: bytes) -> None:
        self._fail("put")
        super().put(name, data)


class SeesLate(Folder):
    """What others have written shows up in its listings only later, as eventually consistent stores have it."""

    def list(self, folder: str = "") -> list[str]:
        return [] if folder == ledger.LEDGER else super().list(folder)


# Races


def race(root: str, seed: int, start: Barrier, wait_s: tuple[float, float], told: multiprocessing.Queue) -> None:
    """A process that claims again and again, each time at about the same moment as the others."""
    ledger._WAIT_S = wait_s
    withdrawn, real = [0], ledger._withdraw

    def counted(store: Store, mine: Claim) -> None:
        withdrawn[0] += 1
        real(store, mine)

    ledger._withdraw = counted
    store, rng, won = store_of(root), random.Random(seed), []
    for i in range(RACES):
        start.wait(limit(60))
        time.sleep(rng.random() * 0.002)
        won.append((claim([store], i), i))
    told.put((won, withdrawn[0]))


def raced(root: str, racers: int, wait_s: tuple[float, float]) -> tuple[list[tuple[int, int]], int]:
    context = multiprocessing.get_context("spawn")
    told, start = context.Queue(), context.Barrier(racers)
    processes = [
        context.Process(target=race, args=(root, seed, start, wait_s, told), daemon=True) for seed in range(racers)
    ]
    for process in processes:
        process.start()
    answers = [told.get(timeout=limit(240)) for _ in processes]
    for process in processes:
        process.join(limit(30))
    return [one for won, _ in answers for one in won], sum(withdrawn for _, withdrawn in answers)


@pytest.mark.timeout(300)
def test_of_starts_that_race_each_has_a_term_of_its_own(store: Store) -> None:
    won, withdrawn = raced(store.where, 2, (0.002, 0.02) if isinstance(store, Folder) else (0.01, 0.1))
    terms = [term for term, _ in won]
    assert len(terms) == len(set(terms)) == 2 * RACES
    assert withdrawn > RACES // 10  # they did get in each other's way
    assert sorted((c.term, c.from_step) for c in read(store).claims) == sorted(won)  # losers have left nothing


def test_a_race_on_a_store_that_shows_writes_late_has_two_winners(tmp_path: Path) -> None:
    """Why a listing must show every write that has returned: what the races above would find."""
    assert claim([SeesLate(tmp_path)], 0) == claim([SeesLate(tmp_path)], 0) == 1


# Terms


def test_a_start_takes_the_term_after_the_highest_of_all_its_stores(tmp_path: Path, store: Store) -> None:
    other = Folder(tmp_path / "other")
    assert claim([other], -1) == 1
    assert claim([store, other], 10) == 2
    assert claim([other], 20) == 3
    assert claim([store, other], 30) == 4
    assert [c.from_step for c in read(store).claims if c.term == 4] == [30]
    assert {c.term for c in read(other).claims} == {1, 2, 3, 4}


def test_a_term_whose_claim_is_lost_is_not_used_again(store: Store) -> None:
    for _ in range(3):
        term = claim([store], -1)
    store.put(f"{Name(10, term)}/manifest.json", b"{}")
    for entry in store.list(ledger.LEDGER):
        store.remove(f"{ledger.LEDGER}/{entry}")
    assert claim([store], 10) == term + 1


def test_a_start_that_loses_in_one_store_withdraws_from_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = Folder(tmp_path / "here"), Folder(tmp_path / "there")
    rivals = iter([1, 2])

    class Contested(Folder):
        def put(self, name: str, data: bytes) -> None:
            super().put(name, data)
            for term in rivals:  # somebody else claims the same term at this very moment, twice
                Folder.put(self, f"{ledger.LEDGER}/{Claim(term, 5, f'{term}')}", b"{}")
                break

    monkeypatch.setattr(ledger, "_WAIT_S", (0.0, 0.0))
    assert claim([here, Contested(there.root)], 7) == 3
    assert [c.term for c in read(here).claims] == [3]
    assert sorted(c.term for c in read(there).claims) == [1, 2, 3]


@pytest.mark.parametrize("fails_at", ["put", "list, of a ledger with a claim in it"])
def test_a_start_that_cannot_claim_everywhere_claims_nowhere(tmp_path: Path, fails_at: str) -> None:
    here = Folder(tmp_path / "here")
    claim([here], -1)
    with pytest.raises(TransientError, match="away"):
        claim([here, Away(tmp_path / "there", fails_at)], 10)
    assert [c.term for c in read(here).claims] == [1]


def test_starts_that_are_given_the_same_seed_do_not_wait_for_equally_long() -> None:
    random.seed(1)
    one = ledger._CHANCE.uniform(0, 1)
    random.seed(1)
    assert ledger._CHANCE.uniform(0, 1) != one


# Fences


def test_who_was_replaced_may_not_publish(store: Store) -> None:
    old = claim([store], -1)
    check_term(store, old)
    new = claim([store], 10)
    with pytest.raises(Fenced, match=rf"term {new} has taken over .* and this process is of term {old}: .*elsewhere"):
        check_term(store, old)
    check_term(store, new)


@pytest.mark.parametrize(
    ("claims", "name", "on_history"),
    [
        ([(1, -1)], (10, 1), True),
        ([(1, -1), (2, 10)], (10, 1), True),  # what the second went on from
        ([(1, -1), (2, 10)], (11, 1), False),  # a zombie's
        ([(1, -1), (2, 10)], (11, 2), True),
        ([(1, -1), (2, 10), (3, 20)], (15, 1), False),  # left behind by the second, and still so
        ([(1, -1), (2, 10), (3, 20)], (15, 2), True),
        ([(1, -1), (2, 10), (3, 5)], (10, 1), False),  # the third went back
        ([(1, -1), (2, -1)], (1, 1), False),  # begun anew
    ],
)
def test_a_checkpoint_counts_as_long_as_all_later_starts_go_on_from_it_or_from_one_after_it(
    claims: Sequence[tuple[int, int]], name: tuple[int, int], on_history: bool
) -> None:
    book = ledger.Ledger(tuple(Claim(*c, "0") for c in claims), frozenset(), frozenset())
    assert book.on_history(Name(*name)) is on_history


# Stores that could not be reached at the start


def test_a_term_is_claimed_later_where_it_could_not_be_at_the_start(tmp_path: Path, store: Store) -> None:
    here = Folder(tmp_path / "here")
    claim([here, store], -1)
    term = claim([here], 30)  # the store is away
    for _ in range(3):
        ensure_claimed(store, term, 30, won_in=here)
    mine = [c for c in read(store).claims if c.term == term]
    assert mine == [c for c in read(here).claims if c.term == term]
    assert mine[0].from_step == 30
    claim([store], 40)
    with pytest.raises(Fenced, match=f"has taken over .* and this process is of term {term}"):
        ensure_claimed(store, term, 30, won_in=here)


def test_a_claim_that_comes_later_is_fenced_by_a_newer_one(tmp_path: Path, store: Store) -> None:
    here = Folder(tmp_path / "here")
    claim([store], -1)
    claim([store], 10)
    term = claim([here], -1)
    with pytest.raises(Fenced, match="term 2 has taken over"):
        ensure_claimed(store, term, -1, won_in=here)
    assert {c.term for c in read(store).claims} == {1, 2}


def test_of_two_disks_with_the_same_term_only_one_has_it_in_the_bucket(tmp_path: Path, store: Store) -> None:
    """Two machines, each with a disk of its own, that take each other for dead; one cannot reach the bucket."""
    one, two = Folder(tmp_path / "one"), Folder(tmp_path / "two")
    for here in (one, two):
        claim([here], -1)
    assert claim([two, store], 10) == claim([one], 10) == 2
    with pytest.raises(Fenced, match=r"another start has claimed term 2 in .* while this one could not reach it"):
        ensure_claimed(store, 2, 10, won_in=one)
    ensure_claimed(store, 2, 10, won_in=two)
    assert len(read(store).claims) == 1


def ensured(root: str, here: str, term: int, start: Barrier, told: multiprocessing.Queue) -> None:
    store, won = store_of(root), True
    start.wait(limit(60))
    try:
        ensure_claimed(store, term, 5, won_in=Folder(here))
    except Fenced:
        won = False
    told.put(won)


def test_two_that_claim_one_term_later_and_at_once_never_both_have_it(tmp_path: Path, store: Store) -> None:
    context = multiprocessing.get_context("spawn")
    told, start, heres = context.Queue(), context.Barrier(2), [tmp_path / "one", tmp_path / "two"]
    for here in heres:
        claim([Folder(here)], 5)
    processes = [
        context.Process(target=ensured, args=(store.where, str(here), 1, start, told), daemon=True) for here in heres
    ]
    for process in processes:
        process.start()
    won = [told.get(timeout=limit(60)) for _ in processes]
    for process in processes:
        process.join(limit(30))
    assert sum(won) == len(read(store).claims) <= 1


# What was published, and what is bad


def test_what_is_noted_is_read_again_and_forgotten_when_told(store: Store) -> None:
    good, bad = Name(10, 1), Name(20, 1)
    for name in (good, bad):
        ledger.note_published(store, name)
    ledger.quarantine(store, bad, "a bit was flipped")
    book = read(store)
    assert (book.published, book.quarantined) == ({good, bad}, {bad})
    assert ledger.quarantine_reason(store, bad) == "a bit was flipped"
    assert ledger.quarantine_reason(store, good) == "no reason is recorded"
    ledger.forget_published(store, bad)
    assert read(store).quarantined == {bad}, "it is still there: until it is deleted nobody may use it"
    ledger.release(store, bad)
    book = read(store)
    assert (book.published, book.quarantined) == ({good}, frozenset())


@pytest.mark.parametrize(
    "entry", ["claim-1-from-2-ab.json", "claim-00001-from-x-ab.json", ".claim", "notes.txt", "published-x"]
)
def test_what_others_have_put_into_the_ledger_is_not_taken_for_an_entry(tmp_path: Path, entry: str) -> None:
    store = Folder(tmp_path)
    store.put(f"{ledger.LEDGER}/{entry}", b"?")
    assert claim([store], -1) == 1
    assert len(read(store).claims) == 1
