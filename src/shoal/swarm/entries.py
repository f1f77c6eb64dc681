"""What a roster is made of, and how each of it is checked: a peer's record, a witness's word, a revocation."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from shoal.net.api import MOST_PROOF, Address, PeerId
from shoal.net.identity import Identity, canonical, is_peer
from shoal.swarm.invite import Admission, address_json, address_of, plain
from shoal.swarm.signed import Forged, Object, check, sign

MOST_KEPT = 1000  # named in one revocation
MOST_NAME = 64
MOST_SEQ = 1 << 53
MOST_ENTRY = MOST_PROOF - 1024  # bytes of a record without its witness


@dataclass(frozen=True)
class Witness:
    """`by` says that it saw the admission of a peer at that time."""

    by: PeerId
    time: int
    signature: str

    def to_json(self) -> Object:
        return {"by": self.by, "time": self.time, "signature": self.signature}


@dataclass(frozen=True)
class Entry:
    """One peer, as it describes itself."""

    peer: PeerId
    seq: int
    name: str
    address: Address
    admission: Admission
    left: bool  # it has said goodbye
    signature: str
    witness: Witness | None = None

    def body(self, swarm: str) -> Object:
        return {
            "swarm": swarm,
            "peer": self.peer,
            "seq": self.seq,
            "name": self.name,
            "address": address_json(self.address),
            "admission": self.admission.to_json(),
            "left": self.left,
        }

    def to_json(self) -> Object:
        held = self.body("")
        del held["swarm"]
        witness = {} if self.witness is None else {"witness": self.witness.to_json()}
        return {**held, "signature": self.signature, **witness}

    @classmethod
    def of(cls, found: object, swarm: str, organiser: PeerId) -> Entry:
        """All signatures checked but the witness's, who need not be known yet: raises `Forged`."""
        if not isinstance(found, dict):
            raise Forged("a record that is none")
        peer, seq, left = found.get("peer"), found.get("seq"), found.get("left")
        if not (isinstance(peer, str) and is_peer(peer)) or type(seq) is not int or not 0 < seq < MOST_SEQ:
            raise Forged("a record without a peer or a number")
        if not isinstance(left, bool):
            raise Forged("a record that is none")
        name, address = plain(found.get("name"), MOST_NAME), address_of(found.get("address"))
        admission = Admission.of(found.get("admission"), peer, swarm, organiser)
        entry = cls(peer, seq, name, address, admission, left, str(found.get("signature")))
        if len(canonical(entry.body(swarm))) > MOST_ENTRY:
            raise Forged("a record that is too long")
        check("record", entry.body(swarm), peer, entry.signature)
        return replace(entry, witness=_witness(found.get("witness")))


@dataclass(frozen=True)
class Revocation:
    """The organiser takes back a peer or an invitation. `keep`: peers that stay although they came by the invitation,
    or were witnessed by the peer."""

    what: str  # "peer" or "invite"
    id: str
    keep: tuple[PeerId, ...]
    time: int
    signature: str

    def body(self, swarm: str) -> Object:
        return {"swarm": swarm, "what": self.what, "id": self.id, "keep": list(self.keep), "time": self.time}

    def to_json(self) -> Object:
        held = self.body("")
        del held["swarm"]
        return {**held, "signature": self.signature}

    @classmethod
    def of(cls, found: object, swarm: str, organiser: PeerId) -> Revocation:
        if not isinstance(found, dict) or found.get("what") not in ("peer", "invite") or not is_peer(found.get("id")):
            raise Forged("a revocation that is none")
        keep, when = found.get("keep"), found.get("time")
        if not isinstance(keep, list) or len(keep) > MOST_KEPT or not all(map(is_peer, keep)) or type(when) is not int:
            raise Forged("a revocation that is none")
        revocation = cls(found["what"], found["id"], tuple(keep), when, str(found.get("signature")))
        check("revocation", revocation.body(swarm), organiser, revocation.signature)
        return revocation


def revocation(swarm: str, organiser: Identity, what: str, id: str, keep: Iterable[PeerId], now: float) -> Revocation:
    new = Revocation(what, id, tuple(sorted(keep))[:MOST_KEPT], int(now), "")
    return replace(new, signature=sign("revocation", new.body(swarm), organiser))


def _witness(found: object) -> Witness | None:
    if not isinstance(found, dict) or not is_peer(found.get("by")) or type(found.get("time")) is not int:
        return None
    return Witness(found["by"], found["time"], str(found.get("signature"))[:128])
