"""The one prefetcher: what is wanted is made in order by one thread, and nothing of it is lost or made twice."""

from __future__ import annotations

import threading

import pytest

from shoal.data.ahead import Ahead
from tests.patience import limit


class Maker:
    """Makes a number of a key, when it may."""

    def __init__(self) -> None:
        self.made: list[int] = []
        self.threads: set[str] = set()
        self.may, self.begun = threading.Semaphore(0), threading.Semaphore(0)

    def __call__(self, key: int) -> int:
        self.begun.release()
        self.may.acquire()
        self.made.append(key)
        self.threads.add(threading.current_thread().name)
        if key < 0:
            raise ValueError(f"no {key}")
        return 10 * key

    def let(self, count: int) -> None:
        for _ in range(count):
            self.may.release()


@pytest.fixture
def maker() -> Maker:
    return Maker()


def test_what_is_wanted_is_made_once_in_order_by_one_thread(maker: Maker) -> None:
    ahead = Ahead(maker, "maker")
    ahead.want([1, 2, 3])
    maker.let(4)
    assert [ahead.get(key) for key in (1, 2, 3, 7)] == [10, 20, 30, 70]
    assert maker.made == [1, 2, 3, 7]
    assert maker.threads == {"maker"}
    ahead.close()


def test_what_is_asked_for_comes_before_what_is_only_wanted(maker: Maker) -> None:
    ahead = Ahead(maker)
    ahead.want([1, 2, 3])
    assert maker.begun.acquire(timeout=limit(10))  # 1 is under way
    found: list[int] = []
    asks = threading.Thread(target=lambda: found.append(ahead.get(3)))
    asks.start()
    while ahead._wanted[0] != 3:  # it has asked
        pass
    maker.let(2)
    asks.join(limit(10))
    assert found == [30]
    assert maker.made == [1, 3]
    maker.let(1)
    ahead.close()


def test_what_is_no_longer_wanted_is_not_made_and_not_kept(maker: Maker) -> None:
    ahead = Ahead(maker)
    ahead.want([1, 2, 3])
    assert maker.begun.acquire(timeout=limit(10))
    ahead.want([5])
    maker.let(2)
    assert ahead.get(5) == 50
    assert maker.made == [1, 5]
    assert not ahead._made  # 1 was under way, and nobody wants it
    ahead.close()


def test_an_error_is_raised_where_its_thing_is_asked_for_and_the_next_is_made(maker: Maker) -> None:
    ahead = Ahead(maker)
    ahead.want([-1, 2])
    maker.let(3)
    with pytest.raises(ValueError, match="no -1"):
        ahead.get(-1)
    assert ahead.get(2) == 20
    ahead.close()


def test_whoever_waits_when_it_is_closed_is_told(maker: Maker) -> None:
    ahead = Ahead(maker)
    told: list[str] = []

    def ask() -> None:
        try:
            ahead.get(1)
        except RuntimeError as e:
            told.append(str(e))

    asks = threading.Thread(target=ask)
    asks.start()
    assert maker.begun.acquire(timeout=limit(10))
    closes = threading.Thread(target=ahead.close)
    closes.start()
    asks.join(limit(10))
    assert told == ["this feed is closed"]
    maker.let(1)
    closes.join(limit(10))
    with pytest.raises(RuntimeError, match="closed"):
        ahead.want([1])
