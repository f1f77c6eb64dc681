"""Things made in a thread before they are asked for: the one prefetcher of all feeds."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Ahead(Generic[K, V]):
    """`make` is called by one thread alone, once for each key, in the order in which they are wanted; what it raises is
    raised by `get`."""

    def __init__(self, make: Callable[[K], V], name: str = "shoal-feed") -> None:
        self._make = make
        self._wanted: list[K] = []  # and not begun
        self._kept: set[K] = set()  # what is wanted in all
        self._doing: K | None = None
        self._made: dict[K, V | BaseException] = {}
        self._closed = False
        self._change = threading.Condition()
        # A daemon: a download that hangs must not keep a process alive that wants to leave.
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def want(self, keys: Sequence[K]) -> None:
        """These come next, most likely. What was wanted before and is not among them is forgotten."""
        with self._change:
            if self._closed:
                raise RuntimeError("this feed is closed")
            self._kept = set(keys)
            self._made = {key: made for key, made in self._made.items() if key in self._kept}
            self._wanted = [key for key in keys if key not in self._made and key != self._doing]
            self._change.notify_all()

    def get(self, key: K) -> V:
        """Waits for it, if it is not made yet; it comes before the others."""
        with self._change:
            if key not in self._made and key != self._doing:
                self._wanted = [key, *(other for other in self._wanted if other != key)]
                self._change.notify_all()
            self._kept.add(key)
            self._change.wait_for(lambda: key in self._made or self._closed)
            if self._closed:
                raise RuntimeError("this feed is closed")
            self._kept.discard(key)
            made = self._made.pop(key)
        if isinstance(made, BaseException):
            raise made
        return made

    def close(self) -> None:
        with self._change:
            self._closed = True
            self._wanted, self._made = [], {}
            self._change.notify_all()
        self._thread.join(timeout=5.0)

    def _work(self) -> None:
        while True:
            with self._change:
                self._change.wait_for(lambda: self._wanted or self._closed)
                if self._closed:
                    return
                key = self._doing = self._wanted.pop(0)
            made: V | BaseException
            try:
                made = self._make(key)
            except BaseException as e:
                made = e  # raised by `get`, in the thread that can do something about it
            with self._change:
                self._doing = None
                if key in self._kept:
                    self._made[key] = made
                self._change.notify_all()
