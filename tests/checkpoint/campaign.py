"""The corruption campaign: a damage is drawn by its number, done, and judged; then the next one.

Judged is what a user would see. The newest checkpoint that is still good is loaded, bit for bit. Each newer one that
was made bad is named with a reason, is quarantined, and is not tried again. Each older one that was made bad is named
by `verify`. Nothing else is complained about.
"""

from __future__ import annotations

import errno
import os
import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from tests.checkpoint.damages import HURTS, HURTS_ON_DISK, SWAPS, Draw
from tests.checkpoint.harmless import HARMLESS, HARMLESS_ON_DISK
from tests.checkpoint.shelves import GOOD, KNOWN_BAD, History, Shelf, about, empty, files_of
from tests.checkpoint.states import same_bits

from shoal import checkpoint
from shoal.checkpoint import Name, ledger
from shoal.checkpoint.store import Store

HOW_MANY = (1, 1, 1, 1, 2, 2, 3)  # of the newest checkpoints that are damaged at once
REFUSED = "a read is refused"
FLIPS = [kind for kind in HURTS if "flipped" in kind]


@dataclass(frozen=True)
class Damage:
    kind: str
    what: str  # in words
    bad: frozenset[Name]
    store: Store  # to be loaded from


class Refusing:
    """A store in which the system refuses to read one file: a failing disk, or a file of another user."""

    def __init__(self, store: Store, file: str, number: int) -> None:
        self._store, self._file, self._number = store, file, number

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def read(self, name: str) -> bytes:
        self._refuse(name)
        return self._store.read(name)

    def read_into(self, name: str, at: int, into: memoryview) -> None:
        self._refuse(name)
        self._store.read_into(name, at, into)

    def _refuse(self, name: str) -> None:
        if name == self._file:
            raise OSError(self._number, os.strerror(self._number), name)


@dataclass
class Tally:
    """How often each kind was tried, and what went wrong."""

    tried: Counter[str] = field(default_factory=Counter)
    harmless: Counter[str] = field(default_factory=Counter)
    clean: int = 0
    missed: list[str] = field(default_factory=list)


def kinds(on_disk: bool) -> list[str]:
    """Of damages that make something bad, in the order in which they are tried; bit flips are half of all."""
    others = [kind for kind in (*HURTS, *SWAPS, *((*HURTS_ON_DISK, REFUSED) if on_disk else ())) if kind not in FLIPS]
    return [kind for i, other in enumerate(others) for kind in (other, FLIPS[i % len(FLIPS)])]


def damage(number: int, shelf: Shelf, history: History) -> Damage:
    """Does the damage with this number."""
    rng, in_turn = random.Random(number), kinds(shelf.on_disk)
    kind = in_turn[number % len(in_turn)]
    draw = Draw(rng, shelf, history)
    if kind in SWAPS:
        what, bad = SWAPS[kind](draw)
        return Damage(kind, what, frozenset(bad), shelf.store)
    if kind == REFUSED:
        file, number = rng.choice(files_of(history.pristine, GOOD[0])), rng.choice([errno.EIO, errno.EACCES])
        store: Any = Refusing(shelf.store, file, number)
        return Damage(kind, f"{os.strerror(number)}: {file}", frozenset(GOOD[:1]), store)
    # The newest ones, or an older one, which only `verify` looks at.
    victims = GOOD[: rng.choice(HOW_MANY)] if rng.random() < 0.9 else [rng.choice(GOOD[1:])]
    hurt = {**HURTS, **HURTS_ON_DISK}[kind]
    what = "; ".join([hurt(draw, name) for name in victims])
    return Damage(kind, what, frozenset(victims), shelf.store)


def harmless(number: int, shelf: Shelf, history: History) -> Damage:
    table: dict[str, Callable[[Draw], str]] = {**HARMLESS, **(HARMLESS_ON_DISK if shelf.on_disk else {})}
    kind = list(table)[number % len(table)]
    what = table[kind](Draw(random.Random(number), shelf, history))
    return Damage(kind, what, frozenset(), shelf.store)


def misses(done: Damage, history: History) -> Iterator[str]:
    """What is not as it should be; nothing when all is."""
    good = next(name for name in GOOD if name not in done.bad)
    expected = {name for name in done.bad if name > good}
    for again in (False, True):
        tensors = empty()
        found = checkpoint.restore(done.store, tensors)
        if found is None or found.name != good:
            yield f"{found and found.name} was loaded instead of {good}"
            return
        if not same_bits(tensors, history.truth(good)) or found.extra != about(good):
            yield f"what was loaded is not {good}"
        said = {skipped.name for skipped in found.skipped if not skipped.known}
        if said != (set() if again else expected):
            yield f"{_shown(said)} passed over{' the second time' if again else ''}, not {_shown(expected)}"
        known = {skipped.name for skipped in found.skipped if skipped.known}
        if again and not expected <= known:
            yield f"{_shown(expected - known)} not known to be bad the second time"
        if any(not skipped.reason for skipped in found.skipped):
            yield "no reason was given"
    quarantined = ledger.read(done.store).quarantined
    if quarantined != {*expected, KNOWN_BAD}:
        yield f"{_shown(quarantined)} quarantined"
    for name in done.bad - expected:
        try:
            checkpoint.verify(checkpoint.open_checkpoint(done.store, name))
            yield f"verify saw nothing in {name}"
        except checkpoint.Corrupt:
            continue


def judge(
    numbers: range, shelf: Shelf, history: History, draw: Callable[[int, Shelf, History], Damage], tally: Tally
) -> None:
    """Draws, does and judges the damages with these numbers; each finds the history as it was."""
    for number in numbers:
        shelf.lay(history.pristine)
        done = draw(number, shelf, history)
        (tally.tried if done.bad else tally.harmless)[done.kind] += 1
        try:
            wrong = list(misses(done, history))
        except Exception as e:  # to be counted, not to end the campaign
            wrong = [f"{type(e).__name__}: {e}"]
        tally.missed += [f"{number}, {done.kind} ({done.what}): {words}" for words in wrong]


def clean_loads(count: int, shelf: Shelf, history: History, tally: Tally) -> None:
    shelf.lay(history.pristine)
    for _ in range(count):
        done = Damage("nothing", "nothing", frozenset(), shelf.store)
        tally.missed += [f"clean load {tally.clean}: {words}" for words in misses(done, history)]
        tally.clean += 1


def _shown(names: Any) -> str:
    return ", ".join(sorted(map(str, names))) or "nothing"
