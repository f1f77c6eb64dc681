"""How much a relay holds for its clients: for each one, for each address, and for all of them together.

Every client may have a little waiting (`OWN`). What is more comes out of one room that all share, and of which one
address gets a part only: a relay's memory is bounded by these numbers, whatever its clients do.
"""

from __future__ import annotations

from collections import Counter

MOST_CONNECTIONS = 2048
MOST_FROM_ONE = 512  # of one address: many peers may be behind one NAT, but nobody takes all places
OWN = 64 << 10  # bytes that may wait for a client, whatever waits for others
SHARED = 128 << 20  # bytes beyond that, over all clients
SHARED_BY_ONE = 32 << 20  # of them, for the clients of one address


class Room:
    def __init__(self, shared: int = SHARED, by_one: int = SHARED_BY_ONE) -> None:
        self._shared, self._by_one = shared, by_one
        self.taken = 0
        self._places: Counter[str] = Counter()
        self._bytes: Counter[str] = Counter()

    def enter(self, host: str) -> bool:
        """Whether there is a place for one more connection; it is counted in any case, until it leaves."""
        self._places[host] += 1
        return self._places.total() <= MOST_CONNECTIONS and self._places[host] <= MOST_FROM_ONE

    def leave(self, host: str) -> None:
        self._places[host] -= 1
        if not self._places[host]:
            del self._places[host]

    @property
    def places(self) -> int:
        return self._places.total()

    def move(self, host: str, before: int, after: int) -> None:
        """So many bytes waited for a client when it was last looked at, and so many do now."""
        change = max(0, after - OWN) - max(0, before - OWN)
        self.taken += change
        self._bytes[host] += change
        if not self._bytes[host]:
            del self._bytes[host]

    def fits(self, host: str, waiting: int, size: int) -> bool:
        more = max(0, waiting + size - OWN) - max(0, waiting - OWN)
        return self.taken + more <= self._shared and self._bytes[host] + more <= self._by_one
