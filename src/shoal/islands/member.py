"""What an island's first rank agrees on with those of the other islands: who is in, and which steps are taken.

The protocol, and why it is safe, are in docs/decisions/022-islands.md. A thread answers the others while the main one
computes; it alone decides that somebody is gone. Everything that both touch is under one lock.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from socket import socket

from shoal.islands.epoch import MOST_RANKS, MOST_TEXT, MOST_WHY, Card, Epoch, Fence
from shoal.islands.lease import Lease
from shoal.islands.lines import Line, Message, answer, ask, connect
from shoal.islands.succession import State, succeed
from shoal.spec.island_shards import deal
from shoal.values import flag, items, text, whole

BEAT_S = 0.25
SILENT_S = 4.0  # without a word of somebody: it has stopped, or the way to it is cut
ANSWER_S = 2.0  # to a question; the thread that answers has nothing else to do
SILENT = f"was silent for {SILENT_S:g} s"
APART_S = 1.0  # for the end of a line to be heard, when somebody else has lost that member
TURN_S = 0.5  # the second in line waits this long for the first to act, the third twice as long, …
LARGER_FIRST_S = SILENT_S + ANSWER_S + 1.0  # whoever may be on the smaller side of a cut waits for the other to act


class Evicted(Exception):
    """The others have gone on without this island. It may join again."""


@dataclass(frozen=True)
class Frozen:
    """What a member answers when it is asked to freeze: its state and whom it hears, or that it is elsewhere."""

    state: State | None
    hears: frozenset[str]
    unknown: bool  # it is in no such epoch

    @staticmethod
    def of(reply: Message) -> Frozen:
        state, hears = reply.get("state"), items(reply.get("hears", []), MOST_RANKS)
        names = frozenset(text(key, MOST_TEXT) for key in hears)
        return Frozen(None if state is None else State.of(state), names, flag(reply.get("unknown", False)))


class Member:
    def __init__(self, card: Card, token: bytes, fence: Fence, shards: int) -> None:
        self.card, self._token, self._fence, self._shards = card, token, fence, shards
        self._lock = threading.Condition()
        self.epoch: Epoch | None = None
        self._state = State(0, 0, [], behind=True)
        self._frozen: float | None = None  # since when
        self._evicted = False
        self._failed: BaseException | None = None  # of the watcher
        self._line: Line | None = None  # to the first member
        self._lines: dict[str, Line] = {}  # … from the others, if that is me
        self._heard_of: dict[str, float] = {}  # when, by key
        self._holds: dict[tuple[int, int], set[str]] = defaultdict(set)  # (epoch, steps) → who
        self._gone: dict[str, tuple[str, float]] = {}  # key → (why, when it was noticed)
        self._apart: dict[tuple[str, str], float] = {}  # who cannot trade with whom, since when
        self._ready: dict[str, Card] = {}  # newcomers that have caught up
        self._were: set[str] = set()  # keys of all that have been members: who was one comes back with another
        self._over: list[Callable[[], None]] = []
        self._closed = threading.Event()
        self._lease = Lease(fence.folder, fence.is_over)
        self._watcher = threading.Thread(target=self._watch, name="fleet-watch", daemon=True)

    # For the main thread.

    def begin(self, epoch: Epoch, applied: int, behind: bool = False) -> None:
        """Becomes active in its first epoch."""
        with self._lock:
            self._state = State(applied, applied, [], behind)
        self.adopt(epoch)
        self._watcher.start()
        threading.Thread(target=self._live, name="fleet-beat", daemon=True).start()

    def caught_up(self, applied: int) -> None:
        with self._lock:
            self._state = State(applied, applied, [], behind=False)

    def when_over(self, call: Callable[[], None]) -> None:
        """To be called, in another thread, whenever an epoch ends."""
        self._over.append(call)

    def take(self, step: int) -> tuple[Epoch, list[int] | None]:
        """This epoch, and the shards of a step (from 0) that are mine in it; None if the step is decided: apply it."""
        with self._lock:
            self._await(lambda: self._frozen is None)
            assert self.epoch is not None
            if self._state.applied > step:
                return self.epoch, None
            have = self.epoch.have if self.epoch.base == step else {}
            mine = deal(self._shards, have, self.epoch.keys)[self.card.key]
            self._state = State(step, step, mine, behind=False)
            return self.epoch, mine

    def hold(self, number: int, step: int) -> bool:
        """This island has the whole gradient of that step. Whether all have, so that it is to be applied."""
        with self._lock:
            assert self.epoch is not None
            if self._frozen is None and self.epoch.number == number:
                self._state = State(step, step + 1, self._state.have, behind=False)
                if self.is_first:
                    self._hear_hold(self.card.key, number, step + 1)
                elif self._line:
                    self._line.say({"kind": "hold", "epoch": number, "steps": step + 1})
            self._await(lambda: self._state.applied > step or self._is_over(number))
            return self._state.applied > step

    def missing(self, number: int, key: str, why: str) -> None:
        """A member did not trade. Returns when there is another epoch."""
        with self._lock:
            assert self.epoch is not None
            while not self._is_over(number):  # said again and again: the first member may not be in this epoch yet
                if self._line and key != self.epoch.first.key:
                    self._line.say({"kind": "missing", "epoch": number, "key": key, "why": why})
                elif self.epoch.number == number:
                    self._suspect(key, why)
                self._await(lambda: self._is_over(number), BEAT_S)

    def leave(self) -> bool | None:
        """True when the others go on without this island; False if there is nobody else to go on; None: not yet, as
        those who could go on have not got the whole state, and get it while this one takes another step."""
        with self._lock:
            assert self.epoch is not None
            number = self.epoch.number
            while not self._evicted and not self._closed.is_set():
                if len(self.epoch.members) == 1 and self._frozen is None:
                    self._gone.pop(self.card.key, None)
                    return False
                if self._is_over(number):
                    return None
                if self._line:
                    self._line.say({"kind": "leave"})
                else:
                    self._suspect(self.card.key, "left")
                self._may_go_on()
                self._lock.wait(BEAT_S)
            return True

    def ready(self, card: Card) -> None:
        """A newcomer has caught up: it is to be in the next epoch. (Of the first member.)"""
        with self._lock:
            if card.key not in self._were:  # else it was stopped for long, or its words were
                self._ready[card.key] = card
                self._lock.notify_all()

    @property
    def is_first(self) -> bool:
        return self.epoch is not None and not self.epoch.ends_life and self.epoch.first.key == self.card.key

    def close(self) -> None:
        self._closed.set()
        self._lease.close()
        with self._lock:
            self._lock.notify_all()
            for line in [*self._lines.values(), *([self._line] if self._line else [])]:
                line.close()

    # What the others ask and say: each in a thread of its own.

    def asked_to_freeze(self, sock: socket, said: Message) -> None:
        number = whole(said.get("epoch"))
        with self._lock:
            if self.epoch is None or number > self.epoch.number:
                reply: Message = {"unknown": True}
            elif number < self.epoch.number:
                reply = {"newer": self.epoch.number}
            else:
                self._freeze()
                reply = {"state": asdict(self._state), "hears": sorted(self._audible())}
        answer(sock, reply)

    def asked_for_status(self, sock: socket, said: Message) -> None:
        with self._lock:
            epoch = None if self.epoch is None else self.epoch.number
            reply = {"key": self.card.key, "epoch": epoch, "evicted": self._evicted, "applied": self._state.applied}
        answer(sock, reply)

    def told_of_epoch(self, sock: socket, said: Message) -> None:
        answer(sock, {})
        if self.epoch is not None:
            self._look()

    def line_from(self, sock: socket, said: Message) -> None:
        key, line = text(said.get("key"), MOST_TEXT), Line(sock)
        with self._lock:
            self._lines[key] = line
            self._heard_of[key] = time.monotonic()
        line.follow(lambda message: self._hear(key, message), lambda: self._lost(key, line, "closed its connection"))

    # The watcher.

    def _watch(self) -> None:
        try:
            self._look_out()
        except Exception as e:  # a defect: the main thread has to hear of it, or it waits for ever
            with self._lock:
                self._failed = e
                self._lock.notify_all()

    def _live(self) -> None:
        """Beats, also while the watcher waits for the answers of others."""
        while not self._closed.wait(BEAT_S):
            with self._lock:
                if self._evicted:
                    return
                self._beat()

    def _look_out(self) -> None:
        while not self._closed.wait(0.0):
            with self._lock:
                self._lock.wait(BEAT_S)
                if self._closed.is_set() or self._evicted:
                    return
                self._notice_silence()
                job = self._job()
            if job:
                with contextlib.suppress(OSError):  # the store cannot be reached: wait
                    job()

    def _job(self) -> Callable[[], None] | None:
        """What is to be done without the lock, if anything."""
        epoch = self.epoch
        assert epoch is not None
        if self._frozen is not None and time.monotonic() - self._frozen < ANSWER_S + TURN_S:
            return self._look  # somebody else is at it
        candidates = [key for key in epoch.keys if key not in self._gone or self._gone[key][0] == "left"]
        if not (self._gone or self._ready or self._frozen is not None):
            if self.is_first and (mute := self._without_line()):
                return lambda: self._knock(mute)
            return self._look if self.is_first and not self._lease.fresh() else None
        if self.card.key not in candidates:
            return self._look
        turn = candidates.index(self.card.key)
        since = min([noticed for _, noticed in self._gone.values()] + [self._frozen or time.monotonic()])
        if turn and time.monotonic() - since < TURN_S * turn:
            return self._look
        return self._propose

    def _propose(self) -> None:
        """Makes the next epoch, or learns that another has."""
        with self._lock:
            epoch = self.epoch
            assert epoch is not None
            self._freeze()
            gone, ready = dict(self._gone), dict(self._ready)
            noticed = time.time() - max([time.monotonic() - at for _, at in gone.values()], default=0.0)
            states = {self.card.key: self._state}
        others = [card for card in epoch.members if card.key not in gone or gone[card.key][0] == "left"]
        others = [card for card in others if card.key != self.card.key]
        heard_by = dict.fromkeys(gone, 0)
        for card, reply in self._ask_all(others, {"for": "freeze", "epoch": epoch.number}):
            if reply is None:
                gone.setdefault(card.key, ("does not answer", time.monotonic()))
            elif reply.state is not None:
                states[card.key] = reply.state
                for key in heard_by:
                    heard_by[key] += 1 if key in reply.hears else -1
            else:  # it is further, or it is not what it was
                if reply.unknown:
                    gone.setdefault(card.key, ("has another life", time.monotonic()))
                self._look()
                if self.epoch is not epoch:
                    return
        mistaken = [key for key, n in heard_by.items() if n > 0 and gone[key][0] == SILENT]
        if mistaken:  # the others hear whom this one does not: it is this one's connection, and they will notice
            with self._lock:
                for key in mistaken:
                    self._gone.pop(key, None)
                    self._heard_of[key] = time.monotonic()
            return
        if all(state.behind for state in states.values()):
            return  # whoever had the whole state is gone; this one has it soon, or has to enter anew
        if self._may_be_cut_off(epoch, set(states), gone):
            return
        self._fence.create(succeed(epoch, states, gone, ready, self.card.key, noticed))
        self._look()  # this one, or the one that was faster
        told = [card for card in [*epoch.members, *ready.values()] if card.key != self.card.key]
        self._ask_all([card for card in told if card.key not in gone or gone[card.key][0] == "left"], {"for": "epoch"})

    def _may_be_cut_off(self, epoch: Epoch, here: set[str], gone: dict[str, tuple[str, float]]) -> bool:
        """Whether more members are out of reach than within, and may be alive: they go first, if they are. Where a
        process is gone its machine says so."""
        away = [card for card in epoch.members if card.key in gone and card.key not in here]
        if len(away) <= len(here) or self._frozen is None or time.monotonic() - self._frozen > LARGER_FIRST_S:
            return False
        with ThreadPoolExecutor(len(away)) as threads:
            refused = sum(threads.map(self._refuses, away))
        return len(away) - refused > len(here)

    def _knock(self, cards: list[Card]) -> None:
        """Who dies before it has called has no connection whose end could tell of it."""
        with ThreadPoolExecutor(len(cards)) as threads:
            dead = [card for card, refused in zip(cards, threads.map(self._refuses, cards), strict=True) if refused]
        with self._lock:
            for card in dead:
                self._suspect(card.key, "has closed the connection")

    def _refuses(self, card: Card) -> bool:
        try:
            ask(card.control, self._token, {"for": "status"}, lambda reply: None, ANSWER_S)
        except ConnectionRefusedError:
            return True
        except OSError:
            return False
        return False

    def _look(self) -> None:
        """Adopts the epochs that have come to be since."""
        while not self._closed.is_set() and not self._evicted:
            assert self.epoch is not None
            found = self._fence.read(self.epoch.number + 1)
            if found is None:
                return
            self.adopt(found)

    def adopt(self, epoch: Epoch) -> None:
        with self._lock:
            if self.epoch is not None and epoch.number <= self.epoch.number:
                return
            before, self.epoch, self._frozen = self.epoch, epoch, None
            self._gone = {}  # who is kept although it wants to leave says so again
            self._were.update(epoch.keys, epoch.left)
            self._ready = {k: v for k, v in self._ready.items() if k not in self._were}
            self._apart.clear()
            self._holds = defaultdict(set, {k: v for k, v in self._holds.items() if k[0] >= epoch.number})
            state = self._state
            if self.card.key not in epoch.keys:
                self._evicted = True
            elif not state.behind and epoch.base > state.applied:
                if epoch.base == state.held:
                    self._state = State(epoch.base, epoch.base, [], behind=False)
                else:
                    self._evicted = True  # it cannot be: whoever is in the epoch holds what is decided
            elif not state.behind:
                self._state = State(state.applied, state.applied, state.have, behind=False)
            now = time.monotonic()
            self._heard_of = dict.fromkeys(epoch.keys, now)
            first = None if epoch.ends_life else epoch.first
            same = first is not None and before is not None and before.first.key == first.key
            old = [] if same or not self._line else [self._line]
            if old:
                self._line = None
            # Whoever is left out may have stopped: nobody reads what it is told, until there is no more room for it.
            out = [key for key in before.keys if key not in epoch.keys] if before is not None else []
            old += [self._lines.pop(key) for key in out if key in self._lines]
            self._lease.hold(self.is_first and not self._evicted, epoch.number)
        for call in self._over:
            call()
        for line in old:
            line.close()
        if first and not self._evicted and first.key != self.card.key and not (same and self._line):
            self._call(first)
        with self._lock:
            self._lock.notify_all()

    # Under the lock.

    def _await(self, true: Callable[[], bool], most_s: float = math.inf) -> None:
        until = time.monotonic() + most_s
        while not true() and time.monotonic() < until:
            self._may_go_on()
            self._lock.wait(min(1.0, most_s))
        if self._evicted:
            raise Evicted

    def _may_go_on(self) -> None:
        if self._evicted or self._closed.is_set():
            raise Evicted
        if self._failed is not None:
            raise RuntimeError("what watches the other islands has failed in this one") from self._failed

    def _is_over(self, number: int) -> bool:
        return self._frozen is None and self.epoch is not None and self.epoch.number != number

    def _freeze(self) -> None:
        if self._frozen is None:
            self._frozen = time.monotonic()

    def _suspect(self, key: str, why: str) -> None:
        if self.epoch is not None and key in self.epoch.keys:
            self._gone.setdefault(key, (why, time.monotonic()))
            self._lock.notify_all()

    def _audible(self) -> set[str]:
        now = time.monotonic()
        return {key for key, at in self._heard_of.items() if now - at < SILENT_S / 2 and key not in self._gone}

    def _hear_hold(self, key: str, number: int, steps: int) -> None:
        self._holds[number, steps].add(key)
        self._commit()

    def _commit(self) -> None:
        """If all hold it, and I am the one to say so."""
        epoch, state = self.epoch, self._state
        if epoch is None or not self.is_first or self._frozen is not None or state.held == state.applied:
            return
        if self._holds[epoch.number, state.held].issuperset(epoch.keys) and self._lease.fresh():
            self._state = State(state.held, state.held, [], behind=False)
            for line in self._lines.values():
                line.say({"kind": "commit", "epoch": epoch.number, "steps": state.held})
            del self._holds[epoch.number, state.held]
            self._lock.notify_all()

    def _beat(self) -> None:
        for line in [*self._lines.values(), *([self._line] if self._line else [])]:
            line.say({"kind": "beat"})
        self._commit()  # a lease may be fresh again

    def _notice_silence(self) -> None:
        assert self.epoch is not None
        listened = self.epoch.keys if self.is_first else [self.epoch.first.key]
        for key in listened:
            if key != self.card.key and time.monotonic() - self._heard_of.get(key, 0.0) > SILENT_S:
                self._suspect(key, SILENT)

    def _without_line(self) -> list[Card]:
        """Members of this epoch that had time to call, and have not. (Of the first member.)"""
        assert self.epoch is not None
        waited = {key for key, at in self._heard_of.items() if time.monotonic() - at > 2 * BEAT_S}
        return [c for c in self.epoch.members if c.key in waited and c.key not in {*self._lines, self.card.key}]

    # Lines.

    def _call(self, first: Card) -> None:
        """To the first member, who may not know yet that it is that."""
        try:
            line = Line(connect(first.control, self._token, {"for": "line", "key": self.card.key}))
        except OSError as e:
            with self._lock:
                self._suspect(first.key, f"cannot be reached ({e})")
            return
        with self._lock:
            if self.epoch is None or self.epoch.ends_life or self.epoch.first.key != first.key:
                line.close()
                return
            self._line = line
            if self._frozen is None and self._state.held > self._state.applied:
                line.say({"kind": "hold", "epoch": self.epoch.number, "steps": self._state.held})
        follow = (lambda message: self._hear(first.key, message), lambda: self._lost(first.key, line, "closed"))
        threading.Thread(target=line.follow, args=follow, name="fleet-line", daemon=True).start()

    def _hear(self, key: str, message: Message) -> None:
        with self._lock:
            self._heard_of[key] = time.monotonic()
            match message.get("kind"):
                case "hold":
                    self._hear_hold(key, whole(message.get("epoch")), whole(message.get("steps")))
                case "commit":
                    state, number, steps = self._state, whole(message.get("epoch")), whole(message.get("steps"))
                    ours = self.epoch is not None and number == self.epoch.number and self._frozen is None
                    if ours and steps == state.held > state.applied:
                        self._state = State(state.held, state.held, [], behind=False)
                        self._lock.notify_all()
                case "missing":
                    who, why = text(message.get("key"), MOST_TEXT), text(message.get("why"), MOST_WHY)
                    if self.epoch is not None and message.get("epoch") == self.epoch.number:
                        self._missing(key, who, why)
                case "leave":
                    self._suspect(key, "left")

    def _missing(self, by: str, key: str, why: str) -> None:
        """Two members cannot trade. If I hear both, the later one has to go: with either the run goes on."""
        assert self.epoch is not None
        if {by, key} <= self._audible():
            now = time.monotonic()
            if now - self._apart.setdefault((by, key), now) < APART_S:
                return  # it is said again; if one of them has died, the end of its line is on its way
            key = max(by, key, key=self.epoch.index)
        self._suspect(key, why)

    def _lost(self, key: str, line: Line, why: str) -> None:
        with self._lock:
            if self._lines.get(key) is line:
                del self._lines[key]
            elif self._line is line:
                self._line = None
            else:
                return  # replaced or given up
            self._suspect(key, why)

    def _ask_all(self, cards: Iterable[Card], message: Message) -> list[tuple[Card, Frozen | None]]:
        def one(card: Card) -> Frozen | None:
            try:
                return ask(card.control, self._token, message, Frozen.of, ANSWER_S)
            except OSError:
                return None

        cards = list(cards)
        if not cards:
            return []
        with ThreadPoolExecutor(len(cards)) as threads:
            return list(zip(cards, threads.map(one, cards), strict=True))
