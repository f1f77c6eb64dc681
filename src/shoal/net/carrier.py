"""One way to one peer: a connection for control, some for bulk, and the messages that travel on them.

Small messages, the heads of large ones and heartbeats go on the control connection and never wait for bulk. Large
bodies are cut into pieces; each bulk connection takes the next piece when it has room, so a slow one takes fewer.
Messages take turns, piece by piece. Memory is bounded: what others may make this side hold comes out of a `Budget`.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, Protocol

from shoal.net import frames
from shoal.net.api import Message, PeerId, Refused, Unreachable, Way
from shoal.net.frames import INLINE, PIECE, BadFrame, Carries, Data
from shoal.net.link_rate import Loss, Rate
from shoal.net.pipe import Broken, Counts, Pipe

MOST_QUEUED = 4 << 20  # control bytes that wait for the connection; beyond it nothing more is told or asked
MOST_WAITING_TELLS = 64 << 20  # bytes of bodies of tells that wait for their turn
MOST_WAITING = 64 << 20  # bytes of answers that a peer has asked for and does not take
MOST_AT_ONCE = 256  # questions of one peer that are being answered
HEAD_S = 10.0  # a piece may overtake the head of its message by so much
STALLED_S = 30.0  # a body that does not come
DRAIN_S = (0.5, 60.0)  # a connection that was replaced: at least and at most so long to finish what is on it
REPLACED = "replaced by a better one"

Key = tuple[Carries, int]


class Budget:
    """Bytes of bodies that others have announced and this endpoint holds. Answers do not count: who asks says how much
    it wants. One peer gets a part of it only, or one message: it must not keep the others out."""

    def __init__(self, most: int, by_one: int) -> None:
        self.free, self._by_one = most, by_one
        self._held: Counter[PeerId] = Counter()

    def try_take(self, peer: PeerId, count: int) -> bool:
        held = self._held[peer]
        if count > self.free or (held and held + count > self._by_one):
            return False
        self.free -= count
        self._held[peer] += count
        return True

    def give(self, peer: PeerId, count: int) -> None:
        self.free += count
        self._held[peer] -= count
        if not self._held[peer]:
            del self._held[peer]


class Host(Protocol):
    """What a carrier needs of its endpoint."""

    budget: Budget

    def most_body(self, kind: str) -> int | None: ...

    async def serve(self, carrier: Carrier, message: Message, asked: bool) -> Message | None: ...

    def heard(self, carrier: Carrier) -> None: ...

    def ended(self, carrier: Carrier, why: str, bad: bool) -> None: ...

    def spawn(self, work: Coroutine[Any, Any, None]) -> None: ...


@dataclass
class _Asked:
    answer: asyncio.Future[Message]
    most_body: int


@dataclass
class _Incoming:
    head: frames.Head
    body: bytearray
    have: bytearray  # one byte a piece
    paid: bool  # out of the budget
    left: int
    moved_s: float


@dataclass
class _Outgoing:
    carries: Carries
    id: int
    body: memoryview
    offset: int = 0
    done: asyncio.Event = field(default_factory=asyncio.Event)


class Carrier:
    def __init__(
        self,
        host: Host,
        peer: PeerId,
        boot: str,
        link: str,
        control: Pipe,
        dialed: bool,
        way: Callable[[], Way],
        open_bulk: Callable[[], Awaitable[Pipe]] | None,
        stripes: int,
        bulk_counts: Callable[[], Counts] | None = None,
    ) -> None:
        self.peer, self.boot, self.link, self.dialed, self.way = peer, boot, link, dialed, way
        self.control, self.retiring, self.closed = control, False, False
        self.suspect = False  # silent for a while; the endpoint looks for another way
        self.born_s = self.heard_s = time.monotonic()
        self.rtt_s: float | None = None
        self.up_bytes_per_s: float | None = None
        self.sent_bytes = self.received_bytes = 0
        self.down, self.loss = Rate(), Loss()
        self._host, self._open_bulk, self._stripes = host, open_bulk, stripes
        self._bulk: list[Pipe] = []
        self._opening = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._queue: deque[list[Data]] = deque()
        self._queued = self._told = 0
        self._posted, self._pieces = asyncio.Event(), asyncio.Event()
        self._outbox: deque[_Outgoing] = deque()
        self._asks: dict[int, _Asked] = {}
        self._incoming: dict[Key, _Incoming] = {}
        self._awaited: dict[Key, asyncio.Future[None]] = {}
        self._dropped: deque[Key] = deque(maxlen=4096)
        self._ids = self._beats = self._serving = 0
        self._farewells = self._done_there = False

    def start(self) -> None:
        self._run(self._read, self.control)
        self._run(self._write_control)

    @property
    def bulk_count(self) -> int:
        return len(self._bulk)

    # What goes out.

    async def ask(self, message: Message, most_body: int) -> Message:
        """The caller bounds the time; when it gives up, the answer is not taken any more."""
        if self._queued > MOST_QUEUED:
            raise Unreachable("the link carries no more questions now")
        id = self._next()
        asked = _Asked(asyncio.get_running_loop().create_future(), most_body)
        self._asks[id] = asked
        try:
            self._send("ask", id, message)
            return await asked.answer
        finally:
            del self._asks[id]
            if not asked.answer.done() or asked.answer.cancelled():
                self._unwant("answer", id)
                self._withdraw("ask", id)

    def tell(self, message: Message) -> bool:
        size = memoryview(message.body).nbytes
        bulk = size if size > INLINE else 0
        if self._queued > MOST_QUEUED or (bulk and self._told + bulk > MOST_WAITING_TELLS and self._told):
            return False
        self._send("tell", self._next(), message)
        self._told += bulk
        return True

    def beat(self) -> None:
        self._beats += 1
        self._post(frames.beat(self._beats & 0xFFFFFFFF, time.monotonic(), self.down.bytes_per_s or 0.0, echo=False))

    def tick(self, now: float) -> None:
        self.down.tick(now)
        pipes = [self.control, *self._bulk]
        each = [p.counts() for p in pipes]
        self.loss.tick(Counts(sum(c.sent for c in each), sum(c.lost for c in each)))
        for key, incoming in list(self._incoming.items()):
            if now - incoming.moved_s > STALLED_S:
                self._unwant(*key)

    def add_bulk(self, pipe: Pipe) -> None:
        if self.closed:
            pipe.close()
            return
        self._bulk.append(pipe)
        self._run(self._read, pipe)
        self._run(self._write_bulk, pipe)

    async def retire(self) -> None:
        """A better one is there: nothing new goes on this one, and it ends when both sides have all that was on it.

        Each says so; whoever closed alone would take with it what is still under way to the other.
        """
        if self.retiring and self._farewells:
            return
        self.retiring, began, said = True, time.monotonic(), False
        self._farewells = True
        while not self.closed:
            age = time.monotonic() - began
            busy = self._asks or self._serving or self._outbox or self._incoming or self._queue
            if not busy and not said and age >= DRAIN_S[0]:
                self._post(frames.bye(REPLACED))
                said = True
            elif (said and self._done_there and not self._queue) or age >= DRAIN_S[1]:
                self.close(REPLACED)
            await asyncio.sleep(0.1)

    def close(self, why: str, bad: bool = False) -> None:
        if self.closed:
            return
        self.closed = True
        for task in self._tasks:
            if task is not asyncio.current_task():
                task.cancel()
        for pipe in (self.control, *self._bulk):
            pipe.close()
        for asked in self._asks.values():
            if not asked.answer.done():
                asked.answer.set_exception(Unreachable(f"the link broke: {why}"))
        for waiting in self._awaited.values():
            waiting.cancel()
        for incoming in self._incoming.values():
            if incoming.paid:
                self._host.budget.give(self.peer, incoming.head.body_bytes)
        for outgoing in self._outbox:
            outgoing.done.set()
        self._incoming.clear()
        self._outbox.clear()
        self._host.ended(self, why, bad)

    async def farewell(self, why: str) -> None:
        """Tells the other, so that it need not wait for a silence; at most a moment."""
        self._post(frames.bye(why))
        for _ in range(20):
            if self.closed or not self._queue:
                break
            await asyncio.sleep(0.005)
        self.close(why)

    def _next(self) -> int:
        self._ids = (self._ids + 1) & 0xFFFFFFFF
        return self._ids

    def _send(self, carries: Carries, id: int, message: Message) -> _Outgoing | None:
        if self.closed:
            raise Unreachable("the link broke")
        self._post(frames.head(carries, id, message))
        body = memoryview(message.body).cast("B")
        if body.nbytes <= INLINE:
            return None
        outgoing = _Outgoing(carries, id, body)
        self._outbox.append(outgoing)
        self._pieces.set()
        self._need_bulk()
        return outgoing

    def _post(self, parts: list[Data]) -> None:
        self._queue.append(parts)
        self._queued += sum(len(p) for p in parts)
        self._posted.set()

    def _need_bulk(self) -> None:
        if self._bulk or self._opening:
            return
        self._opening = True
        if self._open_bulk is None:
            self._post(frames.more())
        else:
            self._run(self._open, self._open_bulk)

    async def _open(self, one: Callable[[], Awaitable[Pipe]]) -> None:
        async def add() -> None:
            self.add_bulk(await one())

        opened = await asyncio.gather(*(add() for _ in range(self._stripes)), return_exceptions=True)
        if not self._bulk:
            raise Broken(f"no connection for bulk could be opened ({opened[0]})")

    async def _write_control(self) -> None:
        while True:
            while self._queue:
                parts = self._queue[0]
                await self.control.send(parts)
                self._queue.popleft()
                size = sum(len(p) for p in parts)
                self._queued -= size
                self.sent_bytes += size
            self._posted.clear()
            await self._posted.wait()

    async def _write_bulk(self, pipe: Pipe) -> None:
        while True:
            while not self._outbox:
                self._pieces.clear()
                await self._pieces.wait()
            out = self._outbox.popleft()
            data = out.body[out.offset : out.offset + PIECE]
            parts = frames.piece(out.carries, out.id, out.offset, data)
            out.offset += data.nbytes
            last = out.offset == out.body.nbytes
            if not last:
                self._outbox.append(out)
            await pipe.send(parts)
            self.sent_bytes += data.nbytes
            if last:
                self._sent(out)

    def _sent(self, out: _Outgoing) -> None:
        out.done.set()
        if out.carries == "tell":
            self._told -= out.body.nbytes

    def _withdraw(self, carries: Carries, id: int) -> None:
        for out in self._outbox:
            if (out.carries, out.id) == (carries, id):
                self._outbox.remove(out)
                self._sent(out)
                return

    # What comes in.

    async def _read(self, pipe: Pipe) -> None:
        while True:
            data = await pipe.receive()
            self.received_bytes += len(data)
            self.heard_s = time.monotonic()
            frame = frames.parse(data)
            if isinstance(frame, frames.Piece) == (pipe is self.control):
                raise BadFrame("pieces and all others have connections of their own")
            if isinstance(frame, frames.Piece):
                await self._on_piece(frame)
            elif isinstance(frame, frames.Head):
                self._on_head(frame)
            elif isinstance(frame, frames.Beat):
                self._on_beat(frame)
            elif isinstance(frame, frames.Refuse):
                self._on_refuse(frame)
            elif isinstance(frame, frames.Stop):
                self._withdraw(frame.carries, frame.id)
            elif isinstance(frame, frames.More):
                if self._open_bulk is not None:
                    self._need_bulk()
            elif frame.why == REPLACED:
                self._done_there = True
                self._host.spawn(self.retire())
            else:
                raise Broken(f"the peer has closed it: {frame.why}")

    def _on_beat(self, beat: frames.Beat) -> None:
        if not beat.echo:
            self._post(frames.beat(beat.id, beat.sent_s, 0.0, echo=True))
            self.up_bytes_per_s = beat.rate or self.up_bytes_per_s
            return
        took = time.monotonic() - beat.sent_s
        if 0 <= took < 60:
            self.rtt_s = took if self.rtt_s is None else 0.7 * self.rtt_s + 0.3 * took
            self._host.heard(self)

    def _on_refuse(self, frame: frames.Refuse) -> None:
        asked = self._asks.get(frame.id)
        self._withdraw("ask", frame.id)
        if asked is not None and not asked.answer.done():
            asked.answer.set_exception(Refused(frame.why or "the peer says no"))

    def _on_head(self, head: frames.Head) -> None:
        key = (head.carries, head.id)
        if key in self._incoming:
            raise BadFrame("two messages with one number")
        if not self._wanted(head):
            if not head.whole:
                self._unwant(*key)
        elif head.whole:
            self._deliver(head, head.body)
        else:
            pieces = -(-head.body_bytes // PIECE)
            paid = head.carries != "answer"  # answers were paid for when they were asked for
            now = time.monotonic()
            body = bytearray(head.body_bytes)
            self._incoming[key] = _Incoming(head, body, bytearray(pieces), paid, head.body_bytes, now)
            self.down.begin(now)
        waiting = self._awaited.pop(key, None)
        if waiting is not None and not waiting.done():
            waiting.set_result(None)

    def _wanted(self, head: frames.Head) -> bool:
        """Whether the message is to be received; refuses it before any of its body is held."""
        if head.carries == "answer":
            asked = self._asks.get(head.id)
            if asked is None or asked.answer.done():
                return False
            if head.body_bytes > asked.most_body:
                why = f"an answer of {head.body_bytes} bytes, where at most {asked.most_body} were asked for"
                asked.answer.set_exception(Refused(why))
                return False
            return True
        most = self._host.most_body(head.kind)
        if most is None:
            why = f"nobody answers {head.kind!r} here"
        elif head.body_bytes > most:
            why = f"a body of {head.body_bytes} bytes, where {head.kind!r} has at most {most}"
        elif self._serving >= MOST_AT_ONCE or sum(out.body.nbytes - out.offset for out in self._outbox) > MOST_WAITING:
            why = "too much at once; ask again later"
        elif not head.whole and not self._host.budget.try_take(self.peer, head.body_bytes):
            why = "no room for the body now; ask again later"
        else:
            return True
        if head.carries == "ask":
            self._post(frames.refuse("ask", head.id, why))
        return False

    async def _on_piece(self, piece: frames.Piece) -> None:
        key = (piece.carries, piece.id)
        if key not in self._incoming and key not in self._dropped:
            waiting = self._awaited.setdefault(key, asyncio.get_running_loop().create_future())
            try:
                async with asyncio.timeout(HEAD_S):
                    await asyncio.shield(waiting)
            except TimeoutError as e:
                raise BadFrame("a piece of a message that never began") from e
        incoming = self._incoming.get(key)
        if incoming is None:
            return
        number, skewed = divmod(piece.offset, PIECE)
        expected = min(PIECE, incoming.head.body_bytes - piece.offset)
        if skewed or len(piece.data) != expected or incoming.have[number]:
            raise BadFrame("a piece that does not fit its message")
        incoming.body[piece.offset : piece.offset + expected] = piece.data
        incoming.have[number], incoming.moved_s = 1, self.heard_s
        incoming.left -= expected
        self.down.add(expected)
        if not incoming.left:
            del self._incoming[key]
            self.down.end(self.heard_s)
            self._deliver(incoming.head, memoryview(incoming.body), incoming.paid)

    def _unwant(self, carries: Carries, id: int) -> None:
        """What still comes of this message is dropped, and the other is told to stop."""
        self._dropped.append((carries, id))
        incoming = self._incoming.pop((carries, id), None)
        if incoming is not None:
            self.down.end(time.monotonic())
            if incoming.paid:
                self._host.budget.give(self.peer, incoming.head.body_bytes)
        if not self.closed:
            self._post(frames.stop(carries, id))

    def _deliver(self, head: frames.Head, body: Data, paid: bool = False) -> None:
        message = Message(head.kind, head.fields, body)
        if head.carries == "answer":
            asked = self._asks.get(head.id)
            if asked is not None and not asked.answer.done():
                asked.answer.set_result(message)
            return
        self._serving += 1
        self._host.spawn(self._serve(head, message, head.body_bytes if paid else 0))

    async def _serve(self, head: frames.Head, message: Message, paid: int) -> None:
        """Not one of this carrier's tasks: what a handler has begun it finishes, even if the answer has no way back."""
        try:
            answer = await self._host.serve(self, message, head.carries == "ask")
            if head.carries == "ask" and not self.closed:
                sent = self._send("answer", head.id, answer or Message("ok"))
                if sent is not None:
                    await sent.done.wait()  # it counts as being answered: a peer that does not read cannot ask for more
        except (Refused, ValueError) as e:  # the latter: an answer that cannot be sent
            if head.carries == "ask" and not self.closed:
                self._post(frames.refuse("ask", head.id, str(e)))
        finally:
            self._serving -= 1
            self._host.budget.give(self.peer, paid)

    def _run(self, work: Callable[..., Coroutine[Any, Any, None]], *given: Any) -> None:
        task = asyncio.ensure_future(self._guard(work, *given))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _guard(self, work: Callable[..., Coroutine[Any, Any, None]], *given: Any) -> None:
        try:
            await work(*given)
        except BadFrame as e:
            self.close(str(e), bad=True)
        except (Broken, OSError) as e:
            self.close(str(e))
        except Exception as e:  # a task that ends unheard would leave a link that looks alive
            self.close(f"{type(e).__name__}: {e}")
