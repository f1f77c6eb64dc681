"""Who is in a swarm: signed records that everybody can check, and the organiser's revocations.

An *entry* is a peer's own record (where it is, what it is called, its admission; numbered, so that older ones are known
as such) and the word of a *witness*: a member that saw the admission while the invitation was good. Without it nobody
could tell a member of last month from a stranger who has found an expired invitation.

Nothing is kept that was not checked, and everything has a largest size. What is refused is told as an event, since a
forged record is either a defect or an attack; at most `MOST_TOLD` a minute, so that an attacker cannot fill the disk.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from shoal.errors import SetupError
from shoal.net.api import MOST_PROOF, Address, Event, PeerId
from shoal.net.identity import Identity, canonical
from shoal.plain_file import read_object
from shoal.swarm.entries import Entry, Revocation, Witness, revocation
from shoal.swarm.invite import SKEW_S, Admission
from shoal.swarm.lies import Lie
from shoal.swarm.signed import Forged, Object, check, sign
from shoal.values import BadValue, items, read_json, table
from shoal.values import name as name_of

FORMAT = 1
MOST_ENTRIES = 2000
MOST_REVOKED = 4000
MOST_FILE, MOST_FIELDS = 64 << 20, 64  # a thousand members and a hundred revocations have 15 MB
MOST_TOLD = 60


@dataclass(frozen=True)
class Changed:
    """What taking something in has done."""

    peers: tuple[PeerId, ...] = ()  # whose records are new
    fresh: tuple[PeerId, ...] = ()  # came, or can be found elsewhere
    gone: tuple[PeerId, ...] = ()  # left, or was revoked
    news: bool = False  # anything that others may not have yet


class Roster:
    """One peer's view of who is in. It belongs to one thread; `Gossip` brings several into line."""

    def __init__(
        self,
        swarm: str,
        organiser: PeerId,
        me: Identity,
        admission: Admission,
        *,
        name: str = "",
        file: Path | None = None,
        event: Event | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.swarm, self.organiser, self.me = swarm, organiser, me
        self.offset_s = 0.0  # to be added to this machine's clock, as most others see it
        self.clock = clock
        self._file, self._event = file, event
        self._trusted: frozenset[PeerId] = frozenset()
        self._entries: dict[PeerId, Entry] = {}
        self._revoked: dict[str, Revocation] = {}
        self._lies: dict[PeerId, Lie] = {}
        self._told: tuple[float, int] = (0.0, 0)
        self.changed: Callable[[Changed, PeerId], None] = lambda changed, sender: None  # `Gossip` listens
        self._own(Entry(me.id, 1, name, Address(), admission, False, ""))

    @classmethod
    def load(
        cls, file: Path, me: Identity, event: Event | None = None, clock: Callable[[], float] = time.time
    ) -> Roster:
        """As `save` left it."""
        try:
            held = read_object(file, MOST_FILE)
            swarm, organiser = name_of(held.get("swarm")), name_of(held.get("organiser"))
            entries = [table(e, MOST_FIELDS) for e in items(held.get("entries"), 2 * MOST_ENTRIES)]
            own = Entry.of(next((e for e in entries if e.get("peer") == me.id), {}), swarm, organiser)
        except FileNotFoundError:
            raise SetupError(f"this peer is in no swarm: there is no {file}; join with an invitation.") from None
        except (ValueError, OSError) as e:  # BadValue, Forged
            raise SetupError(
                f"{file} cannot be read as the roster of this peer ({e}); join again with an invitation."
            ) from None
        roster = cls(swarm, organiser, me, own.admission, name=own.name, event=event, clock=clock)
        roster._entries[me.id] = own
        roster.take(entries, held.get("revocations", []), trusted=True, lies=held.get("lies", []))
        roster._file = file  # only now: reading it must not write it
        return roster

    def trust(self, peers: Iterable[PeerId]) -> None:
        """Those whom our invitation names: whoever wrote it has seen them as members, and their witnesses may be people
        we have not heard of yet."""
        self._trusted = frozenset(peers)

    def save(self) -> None:
        """All of it or nothing; only this peer's account may read where the others are. No fsync: the loop that calls
        this has heartbeats to send, and what a power cut loses the others still know."""
        if self._file is None:
            return
        held = {
            "format": FORMAT,
            "swarm": self.swarm,
            "organiser": self.organiser,
            "entries": [e.to_json() for e in self._entries.values()],
            "revocations": [r.to_json() for r in self._revoked.values()],
            "lies": [lie.to_json() for lie in self._lies.values()],
        }
        self._file.parent.mkdir(parents=True, exist_ok=True)
        part = self._file.with_name(f".{self._file.name}.{os.getpid()}")
        try:
            with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as f:
                json.dump(held, f, separators=(",", ":"))
            part.rename(self._file)
        finally:
            part.unlink(missing_ok=True)

    # Who is in

    @property
    def expelled(self) -> bool:
        """This peer has been revoked, or proven to lie: nobody will talk to it any more."""
        own = self._entries.get(self.me.id)
        return own is None or not self._stays(own)

    def __contains__(self, peer: object) -> bool:
        return peer in self._entries

    def members(self) -> list[PeerId]:
        """All that are in and have not left, this one too, in a fixed order."""
        return sorted(peer for peer, entry in self._entries.items() if not entry.left)

    def others(self) -> dict[PeerId, Entry]:
        return {p: e for p, e in self._entries.items() if p != self.me.id and not e.left}

    def name(self, peer: PeerId) -> str:
        """As people say it: the peer's own name for itself, else the beginning of its key."""
        entry = self._entries.get(peer)
        return (entry.name if entry is not None else "") or peer[:8]

    def entry(self, peer: PeerId) -> Entry | None:
        return self._entries.get(peer)

    def revoked(self) -> dict[str, Revocation]:
        """By the id of the peer or the invitation."""
        return dict(self._revoked)

    def lies(self) -> dict[PeerId, Lie]:
        """Members that were put out by a proof."""
        return dict(self._lies)

    def find(self, text: str) -> list[PeerId]:
        """Peers whose name it is, or whose key begins with it."""
        return sorted(p for p, e in self._entries.items() if text and (e.name == text or p.startswith(text)))

    # What a connection begins with (`net.api.Proof` and `Admit`)

    def proof(self) -> bytes:
        return canonical(self._entries[self.me.id].to_json())

    def admit(self, peer: PeerId, proof: bytes) -> bool:
        """Whether a peer whose key is proven may talk to us; its proof is taken in on the way."""
        if peer in self._revoked or peer in self._lies:
            why = "the organiser has revoked it" if peer in self._revoked else "it was proven to lie"
            self._tell("a revoked peer", why, peer)
            return False
        if not proof and peer in self._entries:
            return True
        try:
            found = read_json(proof) if len(proof) <= MOST_PROOF else None
        except BadValue:
            found = None
        if not isinstance(found, dict) or found.get("peer") != peer:
            self._tell("an uninvited peer", "it has no proof", peer)
            return False
        known = self._entries.get(peer)
        if known is None or type(found.get("seq")) is not int or found["seq"] > known.seq:
            self.take([found], sender=peer)  # an older one is no replay: its key is proven, and its folder a copy
        return peer in self._entries

    # What this peer says

    def announce(self, address: Address | None = None, name: str | None = None, left: bool = False) -> bool:
        """Where this peer is now; whether that is news."""
        old = self._entries[self.me.id]
        new = replace(old, address=address or old.address, name=old.name if name is None else name, left=left)
        if new == old:
            return False
        self._own(replace(new, seq=old.seq + 1))
        return True

    def readmit(self, admission: Admission) -> None:
        """By another invitation than the one before."""
        old = self._entries[self.me.id]
        self._own(replace(old, admission=admission, seq=old.seq + 1, witness=None))

    def revoke(self, organiser: Identity, what: str, id: str, keep: Iterable[PeerId] = ()) -> Changed:
        """By the organiser; the others hear of it by gossip."""
        if organiser.id != self.organiser:
            raise ValueError("only the organiser's key can revoke")
        new = revocation(self.swarm, organiser, what, id, keep, self.now())
        return self.take([], [new.to_json()])

    # What others say

    def accuse(self, lie: Lie) -> Changed:
        """A proof that was found here; one that is too long to be passed on counts here alone."""
        if lie.by == self.me.id or lie.by not in self._entries:
            return Changed()
        if lie.fits:
            return self.take([], lies=[lie.to_json()])
        before = dict(self._entries)
        self._put_out(lie)
        return self._news(before, "")

    def take(
        self,
        entries: object,
        revocations: object = (),
        sender: PeerId = "",
        trusted: bool = False,
        lies: object = (),
    ) -> Changed:
        """Keeps what is newer and good. `trusted`: our own file, where who is in was decided before."""
        before = dict(self._entries)
        news = False
        for found in revocations if isinstance(revocations, list | tuple) else ():
            news |= self._guarded(self._take_revocation, found, sender) is True
        waiting = list(entries) if isinstance(entries, list | tuple) else []
        while waiting:  # a witness may stand behind the one that it speaks for
            later = []
            for found in waiting:
                took = self._guarded(lambda found: self._take_entry(found, trusted), found, sender, final=False)
                news |= took is True
                if took is None:
                    later.append(found)
            if len(later) == len(waiting):
                for found in later:
                    self._guarded(lambda found: self._take_entry(found, trusted), found, sender)
                break
            waiting = later
        for found in lies if isinstance(lies, list | tuple) else ():
            news |= self._guarded(lambda found: self._take_lie(found, trusted), found, sender) is True
        return self._news(before, sender) if news else Changed()

    def _news(self, before: dict[PeerId, Entry], sender: PeerId) -> Changed:
        after = self._entries
        new = [p for p, e in after.items() if p not in before or before[p].signature != e.signature]
        moved = [p for p in new if p not in before or before[p].left or before[p].address != after[p].address]
        gone = [p for p, e in before.items() if not e.left and (p not in after or after[p].left)]
        fresh = [p for p in moved if p != self.me.id and not after[p].left]
        changed = Changed(tuple(new), tuple(fresh), tuple(gone), True)
        self.save()
        self.changed(changed, sender)
        return changed

    def digest(self) -> str:
        """Equal for rosters that have nothing to tell each other."""
        text = canonical([sorted(self.summary().items()), sorted(self._revoked)])
        return hashlib.sha256(text).hexdigest()

    def summary(self) -> dict[PeerId, int]:
        return {peer: entry.seq for peer, entry in self._entries.items()}

    def newer(self, than: dict[PeerId, int]) -> list[Entry]:
        """What somebody with that summary lacks."""
        return [e for p, e in self._entries.items() if e.seq > than.get(p, 0)]

    def now(self) -> float:
        return self.clock() + self.offset_s

    def _own(self, entry: Entry) -> None:
        self._entries[self.me.id] = replace(entry, signature=sign("record", entry.body(self.swarm), self.me))
        self.save()

    def _guarded(
        self, take: Callable[[Object], bool], found: Object, sender: PeerId, final: bool = True
    ) -> bool | None:
        """None: refused for now."""
        try:
            return take(found)
        except (Forged, RecursionError) as e:
            if final:
                self._tell("a forged or expired record", str(e), sender)
            return False if final else None

    def _take_revocation(self, found: Object) -> bool:
        new = Revocation.of(found, self.swarm, self.organiser)
        old = self._revoked.get(new.id)
        if old is not None and (old.time, old.signature) >= (new.time, new.signature):
            return False
        if old is None and len(self._revoked) >= MOST_REVOKED:
            raise Forged("more revocations than a swarm may have")
        self._revoked[new.id] = new
        for peer, entry in list(self._entries.items()):
            if peer != self.me.id and not self._stays(entry):
                del self._entries[peer]
        if self._event is not None:
            self._event("revoked", what=new.what, id=new.id, me=self.expelled)
        return True

    def _take_lie(self, found: Object, trusted: bool) -> bool:
        """Of somebody unknown it is of no use, and anybody could make up many: it comes again if they do."""
        by = found.get("by") if isinstance(found, dict) else None
        if not isinstance(by, str) or by in self._lies or not (by in self._entries or trusted):
            return False
        if len(self._lies) >= MOST_REVOKED:
            raise Forged("more proofs of lies than a swarm may have")
        self._put_out(Lie.of(found, self.swarm))
        return True

    def _put_out(self, lie: Lie) -> None:
        self._lies[lie.by] = lie
        name = self.name(lie.by)
        if lie.by != self.me.id:
            self._entries.pop(lie.by, None)
        if self._event is not None:
            text = f"{name} ({lie.by[:8]}) is put out of the swarm: it {lie.words()}"
            self._event("put-out", peer=lie.by, proof=lie.kind, me=lie.by == self.me.id, text=text)

    def _take_entry(self, found: Object, trusted: bool = False) -> bool:
        peer = found.get("peer") if isinstance(found, dict) else None
        old = self._entries.get(peer) if isinstance(peer, str) else None
        if old is not None and type(found.get("seq")) is int and found["seq"] < old.seq:
            raise Forged("a record that is older than the one that is known")  # late gossip, or a replay
        if old is not None and found.get("signature") == old.signature and old.peer != self.me.id:
            return False  # the one we have; most of gossip is that, and a look at signatures costs 0.2 ms
        new = Entry.of(found, self.swarm, self.organiser)
        if new.peer == self.me.id:
            return self._mirrored(new)
        if not self._stays(new):
            raise Forged("a record of a revoked peer, by a revoked invitation or of one that was proven to lie")
        if old is None:
            if len(self._entries) >= MOST_ENTRIES:
                raise Forged("more peers than a swarm may have")
            if not trusted:
                new = self._witnessed(new)
            self._entries[new.peer] = new
            if self._event is not None and not trusted:
                self._event("peer", peer=new.peer, name=new.name, what="came")
            return True
        if new.seq == old.seq and new.signature <= old.signature:  # of two with one number the same wins everywhere
            return False
        self._entries[new.peer] = replace(new, witness=old.witness)
        return True

    def _mirrored(self, new: Entry) -> bool:
        """Our own record, as others have it: where it is newer than ours our folder was lost or copied back."""
        mine = self._entries[self.me.id]
        if mine.witness is None and new.witness is not None and self._vouches(new):
            self._entries[self.me.id] = mine = replace(mine, witness=new.witness)
            self.save()
        if new.seq > mine.seq or (new.seq == mine.seq and new.signature != mine.signature):
            self._own(replace(mine, seq=new.seq + 1))
            return True
        return False

    def _stays(self, entry: Entry) -> bool:
        by = self._revoked.get(entry.admission.invite or "")
        return (
            entry.peer not in self._revoked and entry.peer not in self._lies and (by is None or entry.peer in by.keep)
        )

    def _witnessed(self, entry: Entry) -> Entry:
        """With a witness that is good, ourselves where we are in time; raises `Forged`."""
        if entry.admission.ticket is None or entry.peer in self._trusted or self._vouches(entry):
            return entry
        if not entry.admission.good_at(self.now()):
            raise Forged("an invitation that has expired")
        when = int(self.now())
        body = {"swarm": self.swarm, "peer": entry.peer, "invite": entry.admission.invite, "time": when}
        return replace(entry, witness=Witness(self.me.id, when, sign("witness", body, self.me)))

    def _vouches(self, entry: Entry) -> bool:
        """Whether its witness is a member and saw it in time, or the organiser wants to keep it."""
        witness, ticket = entry.witness, entry.admission.ticket
        if any(entry.peer in r.keep for r in self._revoked.values()):
            return True
        if witness is None or ticket is None or witness.by not in self._entries or witness.by == entry.peer:
            return False
        body = {"swarm": self.swarm, "peer": entry.peer, "invite": ticket.invite, "time": witness.time}
        try:
            check("witness", body, witness.by, witness.signature)
        except Forged:
            return False
        return witness.time <= ticket.expires + SKEW_S

    def _tell(self, what: str, why: str, peer: PeerId) -> None:
        minute, told = self._told
        now = self.clock()
        if now - minute >= 60:
            minute, told = now, 0
        self._told = (minute, told + 1)
        if self._event is not None and told < MOST_TOLD:
            self._event("refused", what=what, why=why, peer=peer)
