"""A rank's view of the fleet: which shards are its island's, the trade of gradients, and whether a step is taken.

All ranks of an island call the same methods in the same order. The first rank asks its `Member` and tells the others.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from shoal import wire
from shoal.errors import Stopped
from shoal.islands import enter
from shoal.islands.donate import Donor, receive
from shoal.islands.epoch import MOST_TEXT, Card, Epoch, Fence, machine
from shoal.islands.lines import Message, Server, answer, ask, connect
from shoal.islands.member import Evicted, Member
from shoal.islands.trade import Gone, Offer, Over, Traded, Trader
from shoal.parallel import agree
from shoal.parallel.inner import Inner
from shoal.values import text, whole

MOST_PAUSE_S = 5.0  # before another try to join
_WAYS: dict[type, str] = {Epoch: "epoch", Card: "donor"}
PATIENCE_S = 3600.0  # in a trade: others may compute for long; that somebody is gone is told by its member


class Replica(Protocol):
    """The state that all islands have alike.

    A step of the fleet is a batch whose gradient all islands have summed. What a replica makes of it is its own matter,
    as long as all make the same of it: a batch whose numbers are wrong is a step here, and none of the training.
    """

    def restore(self, back: dict[str, Any] | None) -> tuple[int, str]:
        """From the newest checkpoint, or as it is at the beginning, or as was told to `go_back`; its step and a digest
        of all that must be alike on those who go on from there together."""
        ...

    def tensors(self) -> Mapping[str, Tensor]: ...

    def notes(self) -> dict[str, Any]:
        """What belongs to the state and is no tensor; JSON."""
        ...

    def stands_at(self, step: int, notes: dict[str, Any]) -> None:
        """The tensors are filled with another island's state, which had these notes."""
        ...

    def apply(self, step: int, total: Tensor, said: list[dict[str, Any]]) -> None: ...


@dataclass(frozen=True)
class Turn:
    """What is to be done about a step."""

    epoch: Epoch
    shards: list[int]


class Fleet:
    def __init__(self, folder: Path, island: int, islands: int, shards: int, inner: Inner, host: str) -> None:
        self.island, self.islands, self.shards, self._inner = island, islands, shards, inner
        self._fence = Fence(folder)
        self._token = self._fence.token()
        self._host = host
        self._lock = threading.Condition()
        self._incoming: dict[tuple[int, str], socket.socket] = {}
        self._wake, self._waker = socket.socketpair()
        self._waker.setblocking(False)
        self._wake.setblocking(False)
        self._over = 0  # the newest epoch that this rank has heard of
        self._trader: tuple[int, Trader] | None = None
        self._donor = Donor()
        self.epoch: Epoch | None = None
        self._member: Member | None = None
        self._ranks: list[socket.socket] = []
        handlers = {"data": self._data_from, "state": self._donor.asked}
        if inner.speaks:
            handlers |= {
                "freeze": lambda sock, said: self._of_member(sock, said, Member.asked_to_freeze),
                "status": lambda sock, said: self._of_member(sock, said, Member.asked_for_status),
                "epoch": lambda sock, said: self._of_member(sock, said, Member.told_of_epoch),
                "line": lambda sock, said: self._of_member(sock, said, Member.line_from),
                "join": self._join_asked,
                "ready": self._ready_asked,
                "rank": self._rank_from,
            }
        self._server = Server(host, self._token, handlers)
        self._addresses = inner.texts(self._server.address)
        if not inner.speaks:
            threading.Thread(target=self._listen_to_speaker, name="fleet-rank", daemon=True).start()

    # Coming and going.

    def enter(self, replica: Replica, told_to_stop: Callable[[], bool] = lambda: False) -> int:
        """Becomes a member; returns how many steps the state stands at then. Raises `Stopped` if that is asked for
        before others are found."""
        self._forget()
        for tries in itertools.count(1):
            ended, back = self._inner.share(self._end_of_life() if self._inner.speaks else None)
            step, digest = replica.restore(back)
            try:
                failed = ""
                step = self._enter(step, digest, ended, replica, told_to_stop)
            except (OSError, Evicted) as e:  # whoever was to give its state is gone: what has come is worth nothing
                failed = str(e) or type(e).__name__
            why = next(filter(None, self._inner.texts(failed[: agree.LINE_BYTES // 4])), "")
            if not why:
                return step
            self._forget()
            if self._inner.speaks:
                print(f"shoal: island {self.island} could not join ({why}) and tries again", file=sys.stderr)
            time.sleep(min(0.1 * 2**tries, MOST_PAUSE_S))
        raise AssertionError

    def leave(self) -> bool | None:
        """Whether the others go on; if not, this island is the last one, and has to save. None: after another step."""
        gone: bool | None = self._inner.share(self._member.leave() if self._member else None)
        return gone

    def go_back(self, back: dict[str, Any]) -> None:
        """Ends the life of the fleet: all islands restore the state as `back` tells, and gather again. To be called by
        all at the same step; what one of them says counts. Then `enter`."""
        assert self.epoch is not None
        if self._inner.speaks:
            self._fence.end(self.epoch.life, back)

    def close(self) -> None:
        self._drop_trader()
        if self._member:
            self._member.close()
        self._donor.drop()
        self._server.close()
        for sock in self._ranks:
            sock.close()

    # A step.

    def take(self, step: int, replica: Replica) -> Turn | None:
        """What this island has to compute of a step (from 0). None: nothing, the step is decided and to be applied."""
        plan: dict[str, Any] = {}
        if self._member:
            try:
                epoch, shards = self._member.take(step)
                new = self.epoch is None or self.epoch.number != epoch.number
                plan = {"epoch": asdict(epoch) if new else None, "shards": shards, "donate": self._donor.wanted()}
            except Evicted:
                plan = {"evicted": True}
        plan = self._inner.share(plan)
        if "evicted" in plan:
            raise Evicted
        if plan["epoch"] is not None:
            self.epoch = Epoch.of(plan["epoch"])
            self._drop_trader()
        assert self.epoch is not None
        for key in plan["donate"]:
            self._donor.begin(key, step, replica.tensors(), replica.notes())
        self._donor.finish(self.epoch.keys, step)
        return None if plan["shards"] is None else Turn(self.epoch, plan["shards"])

    def trade(self, step: int, offer: Offer, total: Tensor, tree: bool) -> Traded | None:
        """The sum over all islands, once all have it; None when the epoch has ended before that."""
        assert self.epoch is not None
        traded, missing = None, ""
        try:
            shards = self.shards if tree else None
            traded = self._connected().sum(step, offer, total, shards, PATIENCE_S)
        except Over:
            pass
        except Gone as e:
            missing = f"{self.epoch.keys[e.member]} {e}"
        held = self._inner.all(traded is not None)
        reports = self._inner.texts(missing[: agree.LINE_BYTES // 4])
        return traded if self._decide(step, held, [report for report in reports if report]) else None

    def together(self, step: int) -> bool:
        """Whether all islands have come here, in this epoch. A step without a gradient."""
        assert self.epoch is not None
        return self._decide(step, True, [])

    def applied(self, step: int, traded: Traded) -> None:
        """To whoever is about to join."""
        self._donor.log(step, traded.total, traded.said)

    @property
    def is_first(self) -> bool:
        """Whether this island writes the journal and the checkpoints."""
        return self.epoch is not None and self.epoch.first.island == self.island

    def _decide(self, step: int, held: bool, missing: list[str]) -> bool:
        """`missing`: what the ranks of this island say of those who did not trade with them: key, and why."""
        assert self.epoch is not None
        verdict: bool | str | None = None
        if self._member:
            try:
                if held:
                    verdict = self._member.hold(self.epoch.number, step)
                elif missing:
                    key, _, why = missing[0].partition(" ")
                    self._member.missing(self.epoch.number, key, why)
                    verdict = False
                else:
                    verdict = False
            except Evicted:
                verdict = "evicted"
        verdict = self._inner.share(verdict)
        if verdict == "evicted":
            raise Evicted
        return bool(verdict)

    # Connections.

    def _connected(self) -> Trader:
        """To the same rank of the other islands of this epoch."""
        epoch = self.epoch
        assert epoch is not None
        if self._trader and self._trader[0] == epoch.number:
            return self._trader[1]
        self._drop_trader()
        me = epoch.index(self._key)
        socks: dict[int, socket.socket] = {}
        try:
            for i, card in enumerate(epoch.members[:me]):
                said = {"for": "data", "epoch": epoch.number, "key": self._key}
                try:
                    socks[i] = connect(card.data[self._inner.rank], self._token, said)
                except OSError as e:
                    raise Gone(i, f"cannot be reached ({e})") from e
            for i, card in enumerate(epoch.members[me + 1 :], me + 1):
                socks[i] = self._await_data(epoch.number, card.key)
        except BaseException:
            for sock in socks.values():
                sock.close()
            raise
        trader = Trader(me, socks, self._wake, lambda: self._over > epoch.number)
        self._trader = (epoch.number, trader)
        return trader

    def _await_data(self, number: int, key: str) -> socket.socket:
        with self._lock:
            while (number, key) not in self._incoming:
                if self._over > number:
                    raise Over
                self._lock.wait(1.0)
            return self._incoming.pop((number, key))

    def _data_from(self, sock: socket.socket, said: Message) -> None:
        by = whole(said.get("epoch")), text(said.get("key"), MOST_TEXT)
        with self._lock:
            for key in [key for key in self._incoming if key[0] < self._over]:
                self._incoming.pop(key).close()
            self._incoming[by] = sock
            self._lock.notify_all()

    def _drop_trader(self) -> None:
        if self._trader:
            self._trader[1].close()
            self._trader = None

    def _hear_over(self, number: int) -> None:
        """There is a newer epoch: whatever waits for the members of an older one need not."""
        with self._lock:
            self._over = max(self._over, number)
            self._lock.notify_all()
        with contextlib.suppress(BlockingIOError):
            self._waker.send(b"!")

    def _tell_ranks(self) -> None:
        assert self._member is not None
        assert self._member.epoch is not None
        number = self._member.epoch.number
        self._hear_over(number)
        for sock in self._ranks:
            with contextlib.suppress(OSError):
                sock.sendall(number.to_bytes(8, "big"))

    def _rank_from(self, sock: socket.socket, said: Message) -> None:
        self._ranks.append(sock)

    def _listen_to_speaker(self) -> None:
        with contextlib.suppress(OSError):
            sock = connect(self._addresses[0], self._token, {"for": "rank"}, 60.0)
            while len(data := sock.recv(8, socket.MSG_WAITALL)) == 8:
                self._hear_over(int.from_bytes(data, "big"))

    def _of_member(self, sock: socket.socket, said: Message, method: Any) -> None:
        if self._member is None:
            answer(sock, {"unknown": True})
        else:
            method(self._member, sock, said)

    # A newcomer.

    @property
    def _key(self) -> str:
        return self._card.key

    def _forget(self) -> None:
        """What it was a member of."""
        self._drop_trader()
        self._donor.drop()
        self.epoch = None
        if self._member:
            self._member.close()
            self._member = None

    def _end_of_life(self) -> tuple[int, dict[str, Any] | None]:
        newest = self._fence.newest()
        return (newest.number, newest.back) if newest is not None and newest.ends_life else (0, None)

    def _enter(self, step: int, digest: str, ended: int, replica: Replica, told_to_stop: Callable[[], bool]) -> int:
        key = self._inner.share(f"{self.island}-{secrets.token_hex(4)}")
        control = self._addresses[0]
        self._card = Card(key, self.island, control, tuple(self._addresses), machine(), os.getpid())
        found: dict[str, Any] = {}
        if self._inner.speaks:
            self._member = Member(self._card, self._token, self._fence, self.shards)
            self._member.when_over(self._tell_ranks)
            known = (self._card, self._fence, self._token, self.islands, step, digest, ended, told_to_stop)
            try:
                way = enter.find(*known)
                found = {"stop": True} if way is None else {_WAYS[type(way)]: asdict(way)}
            except OSError as e:  # all ranks have to hear of it
                found = {"failed": str(e) or type(e).__name__}
        found = self._inner.share(found)
        if "stop" in found:
            raise Stopped(f"island {self.island} was told to stop before it had joined the others.")
        if "failed" in found:
            raise ConnectionError(found["failed"])
        if "epoch" in found:
            epoch = Epoch.of(found["epoch"])
            if self._member:
                self._member.begin(epoch, step)
            return step
        return self._receive(Card.of(found["donor"]), replica)

    def _receive(self, donor: Card, replica: Replica) -> int:
        at, asked = 0, 0.0

        def loaded(step: int, notes: dict[str, Any]) -> None:
            nonlocal at
            at = step
            replica.stands_at(step, notes)

        def idle() -> None:
            """Caught up with what there is: may this island be a member now?"""
            nonlocal asked
            if not self._member or self._member.epoch is not None:
                return
            newest = self._fence.newest()
            if newest is not None and self._key in newest.keys:
                self._member.begin(newest, at, behind=True)
            elif newest is not None and newest.ends_life:
                raise enter.OldState("the fleet goes back to an older state")
            elif newest is not None and time.monotonic() - asked > 1.0:
                asked = time.monotonic()
                with contextlib.suppress(OSError):
                    ready = {"for": "ready", "card": asdict(self._card)}
                    ask(newest.first.control, self._token, ready, lambda reply: None)

        def waiting() -> None:
            """It does not begin before the donor's next step, and never if that is a member no more."""
            newest = self._fence.newest()
            if newest is None or donor.key not in newest.keys:
                raise wire.Broken("whoever was to give its state is gone")

        said = {"for": "state", "key": self._key}
        with connect(donor.data[self._inner.rank], self._token, said) as sock:
            for entry in receive(sock, replica.tensors(), loaded, idle, waiting):
                if entry.step != at:
                    raise wire.Broken(f"step {entry.step} came after {at} steps")
                replica.apply(entry.step, entry.total, entry.said)
                at = entry.step + 1
        if self._member:
            while self._member.epoch is None:  # the end came before the news
                idle()
            if at < self._member.epoch.base:
                raise wire.Broken(f"the others have gone on from {at} steps to {self._member.epoch.base} without it")
            self._member.caught_up(at)
        return at

    def _join_asked(self, sock: socket.socket, said: Message) -> None:
        """Of the first member: which island is to give its state? The last one, which has the least to do."""
        epoch = self._member.epoch if self._member else None
        if epoch is None or not self._member or not self._member.is_first:
            answer(sock, {"wait": True})
        else:
            answer(sock, {"donor": asdict(epoch.members[-1])})

    def _ready_asked(self, sock: socket.socket, said: Message) -> None:
        if self._member and self._member.is_first:
            self._member.ready(Card.of(said.get("card")))
        answer(sock, {})
