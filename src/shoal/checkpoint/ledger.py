"""The ledger of a store: who may write, what was published, what is bad. Its entries are names; nothing is ever edited.

A start of the workers claims the next *term* and says from which step it goes on. From then on a checkpoint of an older
term counts only up to that step: a writer that was believed dead may publish what it likes, no reader will see it.
That needs no lock and no conditional write. Two that claim at once write their claims, then look: whoever sees another
of the same or a higher term gives way and tries a higher one; at most one can have seen nobody.
"""

from __future__ import annotations

import json
import random
import re
import secrets
import socket
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass

from shoal import values
from shoal.checkpoint.names import Name
from shoal.checkpoint.seals import opened, seal, sealed
from shoal.checkpoint.store import Store
from shoal.errors import SetupError, ShoalError, TransientError

LEDGER = "ledger"
_CLAIM = re.compile(r"claim-(\d{5,18})-from-(\d{1,18}|none)-([0-9a-f]{1,64})\.json")
_TRIES, _WAIT_S = 8, (0.05, 0.3)
_CHANCE = random.SystemRandom()  # starts that were given the same seed must not wait for equally long


class Fenced(SetupError):
    """A newer start of this run has taken over; this one must end."""


@dataclass(frozen=True)
class Claim:
    term: int
    from_step: int  # -1: from nothing
    nonce: str

    def __str__(self) -> str:
        goes_on_from = "none" if self.from_step < 0 else str(self.from_step)
        return f"claim-{self.term:05d}-from-{goes_on_from}-{self.nonce}.json"


@dataclass(frozen=True)
class Summary:
    """What retention asks of a checkpoint: noted when it is published, so that a manifest is not read for it."""

    world: int
    bytes: int  # of the ranks' files
    manifest_bytes: int
    eval_loss: float | None  # at that step


@dataclass(frozen=True)
class Ledger:
    """What a store's ledger said when it was read."""

    claims: tuple[Claim, ...]
    published: frozenset[Name]
    quarantined: frozenset[Name]

    @property
    def term(self) -> int:
        """The highest that was claimed; 0 before the first claim."""
        return max((claim.term for claim in self.claims), default=0)

    def on_history(self, name: Name) -> bool:
        """Whether all later claims go on from this checkpoint, or from one after it."""
        return all(claim.term <= name.term or name.step <= claim.from_step for claim in self.claims)


def read(store: Store) -> Ledger:
    claims, published, quarantined = [], set(), set()
    for entry in store.list(LEDGER):
        if match := _CLAIM.fullmatch(entry):
            claims.append(Claim(int(match[1]), -1 if match[2] == "none" else int(match[2]), match[3]))
        else:
            kind, _, rest = entry.removesuffix(".json").partition("-")
            name = Name.of(rest)
            if name and kind == "published":
                published.add(name)
            elif name and kind == "quarantined":
                quarantined.add(name)
    return Ledger(tuple(claims), frozenset(published), frozenset(quarantined))


def claim(stores: Sequence[Store], from_step: int) -> int:
    """Takes the next term in all stores, or raises. What goes on from nothing has `from_step` -1."""
    for again in range(_TRIES):
        time.sleep(_CHANCE.uniform(*_WAIT_S) * again)
        mine = Claim(1 + max(map(_highest, stores)), from_step, secrets.token_hex(4))
        if _take(stores, mine):
            return mine.term
    raise TransientError(f"another start of this run claims {stores[0].where} at the same time; only one can go on.")


def _highest(store: Store) -> int:
    """Of all terms that have left a trace: one that was used is never used again, even where its claim is lost."""
    book = read(store)
    names = {name for entry in store.list() if (name := Name.of(entry))} | book.published | book.quarantined
    return max([book.term, *(name.term for name in names)])


def _take(stores: Sequence[Store], mine: Claim) -> bool:
    """Writes a claim and looks whether somebody else has one of this term or of a higher; then, or when a store fails,
    it is withdrawn from all of them."""
    about = {"term": mine.term, "from_step": mine.from_step, "host": socket.gethostname(), "at": round(time.time(), 3)}
    with ExitStack() as withdraw:
        for store in stores:
            withdraw.callback(_withdraw, store, mine)
            store.put(f"{LEDGER}/{mine}", json.dumps(about).encode() + b"\n")
            if any(other.nonce != mine.nonce and other.term >= mine.term for other in read(store).claims):
                return False
        withdraw.pop_all()
    return True


def _withdraw(store: Store, mine: Claim) -> None:
    with suppress(OSError, ShoalError):  # what stays fences nobody who would not be fenced by whoever comes next
        store.remove(f"{LEDGER}/{mine}")


def ensure_claimed(store: Store, term: int, from_step: int, won_in: Store | None = None) -> None:
    """Before publishing in a store that could not be reached when the term was claimed: now it is, or `Fenced`.

    `won_in` is a store in which this start has its term. Another start, with another disk, may have claimed the same
    number here in the meantime; with `won_in` its claim is told from ours.
    """
    book = read(store)
    _refuse_if_later(store, book, term)
    there = [claim for claim in book.claims if claim.term == term]
    ours = [c for c in read(won_in).claims if (c.term, c.from_step) == (term, from_step)] if won_in else []
    if any(claim in (ours or there) for claim in there):
        return
    mine = min(ours, key=str) if ours else Claim(term, from_step, secrets.token_hex(4))
    if there or not _take([store], mine):
        check_term(store, term)
        raise Fenced(
            f"another start has claimed term {term} in {store.where} while this one could not reach it: the run goes "
            "on elsewhere, and nothing of this process is published there."
        )


def check_term(store: Store, term: int) -> None:
    """Before publishing: nobody has taken over."""
    _refuse_if_later(store, read(store), term)


def _refuse_if_later(store: Store, book: Ledger, term: int) -> None:
    if book.term > term:
        raise Fenced(
            f"term {book.term} has taken over {store.where} and this process is of term {term}: the run goes on "
            "elsewhere, and nothing of this process is published any more."
        )


def note_published(store: Store, name: Name, summary: Summary | None = None) -> None:
    head = json.dumps({} if summary is None else asdict(summary)).encode().removesuffix(b"}")
    store.put(_entry("published", name), head + seal(head) if summary is not None else b"{}\n")


def summary(store: Store, name: Name) -> Summary | None:
    """What was noted when it was published; None where nothing was, or it is not to be read."""
    try:
        data = store.read(_entry("published", name))
        if not sealed(data):
            return None
        fields = opened(data)
        world, size, of_manifest = (
            values.field(fields, name, values.whole) for name in ("world", "bytes", "manifest_bytes")
        )
        return Summary(world, size, of_manifest, values.field(fields, "eval_loss", values.maybe(values.real)))
    except (OSError, EOFError, values.BadValue):
        return None


def forget_published(store: Store, name: Name) -> None:
    """Before a checkpoint is deleted on purpose: it will not be missed."""
    store.remove(_entry("published", name))


def quarantine(store: Store, name: Name, reason: str) -> None:
    """From now on no reader uses this checkpoint; it stays where it is, as evidence, until it has grown old."""
    store.put(_entry("quarantined", name), json.dumps({"reason": reason, "at": round(time.time(), 3)}).encode() + b"\n")


def quarantine_reason(store: Store, name: Name) -> str:
    try:
        return values.field(values.read_object(store.read(_entry("quarantined", name))), "reason", values.short)
    except (OSError, EOFError, values.BadValue):
        return "no reason is recorded"


def release(store: Store, name: Name) -> None:
    """Lets a quarantined checkpoint be used again, or forgets one that has been deleted."""
    store.remove(_entry("quarantined", name))


def _entry(kind: str, name: Name) -> str:
    return f"{LEDGER}/{kind}-{name}.json"
