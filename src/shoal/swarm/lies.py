"""Proof that a member has lied: its own signed words, which anybody can check without believing who shows them.

Three kinds. `range`: a message that it has signed with a number in it that no honest peer sends. `proposals`: it has
proposed two rounds after one head in one term. `acks`: it has agreed to two. Whoever holds such a proof puts the liar
out and passes the proof on; nobody has to be asked. What cannot be proven (garbage without a signature, silence) costs
the peer its budget instead (`talk`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from shoal.net.api import PeerId
from shoal.net.identity import canonical
from shoal.swarm.chain import Chain
from shoal.swarm.messages import MOST, SIGNATURE, Proposed, read, read_proposed
from shoal.swarm.round_record import Certified, Record, ack_text, proposal_text, verified
from shoal.swarm.signed import Forged, Object, decode64, encode64
from shoal.swarm.terms import MOST_TERM
from shoal.values import BadValue, OutOfRange, items, name, table, text

MOST_PROOF = 128 << 10  # bytes of one
MOST_HEARD = 256  # proposals that are remembered


def said_bytes(swarm: str, kind: str, body: bytes) -> bytes:
    """What a peer signs of each message about the history."""
    return b"shoal swarm said 1\n" + f"{swarm}\n{kind}\n".encode() + body


@dataclass(frozen=True)
class Lie:
    by: PeerId
    kind: str
    evidence: Object

    def to_json(self) -> Object:
        return {"by": self.by, "kind": self.kind, "evidence": self.evidence}

    @property
    def fits(self) -> bool:
        """Whether it can be passed on."""
        return len(canonical(self.to_json())) <= MOST_PROOF

    @classmethod
    def of(cls, found: object, swarm: str) -> Lie:
        """Checked in full: `Forged` for what proves nothing."""
        try:
            held = table(found, 3)
            lie = cls(name(held.get("by")), text(held.get("kind"), 16), table(held.get("evidence"), 8))
            if not lie.fits or lie.kind not in _CHECKS or not _CHECKS[lie.kind](lie, swarm):
                raise Forged("a proof of a lie that proves none")
        except (BadValue, RecursionError, UnicodeError):
            raise Forged("a proof of a lie that is none") from None
        return lie

    def words(self) -> str:
        """What it has done, after its name."""
        match self.kind:
            case "proposals":
                return f"has proposed two records in term {self.evidence['first']['term']} after one head"
            case "acks":
                return f"has agreed to two records in term {self.evidence['term']} after one head"
            case _:
                return f"has signed a {self.evidence['message']} with {self.evidence['why']}"


# Making them.


def out_of_range(by: PeerId, kind: str, body: bytes, signature: str, why: str) -> Lie:
    return Lie(by, "range", {"message": kind, "body": encode64(body), "signature": signature, "why": why[:100]})


def forks(chain: Chain, new: Certified) -> list[Lie]:
    """Who has signed this record and another one of the same term after the same head."""
    if new.record.kind != "round":
        return []
    found: dict[PeerId, Lie] = {}
    for other in chain.after(new.record.parent):
        if other.record.kind != "round" or other.term != new.term or other.record.hash == new.record.hash:
            continue
        for peer in sorted(new.signatures.keys() & other.signatures.keys()):
            both = [{"record": c.record.body(), "signature": c.signatures[peer]} for c in (new, other)]
            lie = Lie(peer, "acks", {"term": new.term, "first": both[0], "second": both[1]})
            if _two_acks(lie, chain.swarm):  # a certificate may hold signatures that are none
                found[peer] = lie
    return list(found.values())


class Proposals:
    """What leaders have signed, as heard from themselves and from others: two in one term are a lie."""

    def __init__(self, swarm: str, verify: Callable[[PeerId, bytes, str], bool] = verified) -> None:
        self._swarm, self._verify = swarm, verify
        self._heard: OrderedDict[tuple[PeerId, str, int], Proposed] = OrderedDict()
        self.newest: Proposed | None = None

    def hear(self, said: Proposed) -> Lie | None:
        """Anybody may pass it on. A signature that is wrong is nobody's word, and nobody is told of it."""
        key = (said.by, said.head, said.term)
        known = self._heard.get(key)
        if known is not None and known.name == said.name:
            return None
        if not self._verify(said.by, _proposal_bytes(self._swarm, said), said.signature):
            return None
        self.newest = said
        if known is not None:
            return Lie(said.by, "proposals", {"first": known.body(), "second": said.body()})
        self._heard[key] = said
        if len(self._heard) > MOST_HEARD:
            self._heard.popitem(last=False)
        return None


# Checking them.


def _proposal_bytes(swarm: str, said: Proposed) -> bytes:
    return proposal_text(swarm, said.head, said.term, said.name)


def _two_proposals(lie: Lie, swarm: str) -> bool:
    a, b = (read_proposed(lie.evidence.get(which)) for which in ("first", "second"))
    same = (a.by, a.head, a.term) == (b.by, b.head, b.term) == (lie.by, a.head, a.term)
    return same and a.name != b.name and all(verified(x.by, _proposal_bytes(swarm, x), x.signature) for x in (a, b))


def _two_acks(lie: Lie, swarm: str) -> bool:
    term, found = lie.evidence.get("term"), list[Record]()
    if type(term) is not int or not 0 <= term <= MOST_TERM:
        return False
    for which in ("first", "second"):
        held = table(lie.evidence.get(which), 2)
        record = Record.of(held.get("record"))
        if not verified(lie.by, ack_text(swarm, record.hash, term), text(held.get("signature"), SIGNATURE)):
            return False
        found.append(record)
    a, b = found
    return a.kind == b.kind == "round" and a.parents == b.parents and a.hash != b.hash


def _out_of_range(lie: Lie, swarm: str) -> bool:
    kind = text(lie.evidence.get("message"), 16)
    try:
        body = decode64(lie.evidence.get("body"))
    except ValueError:
        return False
    text(lie.evidence.get("why"), 100)
    if kind not in MOST or not verified(
        lie.by, said_bytes(swarm, kind, body), text(lie.evidence.get("signature"), SIGNATURE)
    ):
        return False
    try:
        read(kind, body)
    except OutOfRange:
        return True
    except BadValue:
        return False
    return False


_CHECKS: dict[str, Callable[[Lie, str], bool]] = {
    "proposals": _two_proposals,
    "acks": _two_acks,
    "range": _out_of_range,
}


def read_lies(said: object, most: int) -> list[Any]:
    """As they travel, each still to be checked."""
    return items(said, most) if said is not None else []
