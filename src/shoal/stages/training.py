"""A peer of a pipeline from its first message to its last: until the last step counts, or until it is told to stop."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
import time
from collections.abc import Coroutine, Iterator
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from shoal.errors import ShoalError, Stopped
from shoal.journal.journal import Journal
from shoal.net.api import Endpoint, Event
from shoal.spec.duration import seconds
from shoal.spec.run import Run
from shoal.stages.peer import Peer
from shoal.stages.routes import Layout
from shoal.stages.states import saves_at
from shoal.stages.work import Work
from shoal.train.evaluate import evaluates_at

T = TypeVar("T")


class Told(Exception):
    """The peer is to stop."""


class End:
    """That a peer is to stop, by a signal or a command; or why it cannot go on. Belongs to the running loop."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.error: ShoalError | None = None
        self._told: asyncio.Future[None] = loop.create_future()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.stop)

    def stop(self) -> None:
        if not self._told.done():
            self._told.set_result(None)

    def fail(self, error: ShoalError) -> None:
        self.error = self.error or error
        self.stop()

    async def unless_told(self, work: Coroutine[Any, Any, T]) -> T:
        """What comes of it; `Told` where the peer is to stop before."""
        task = asyncio.ensure_future(work)
        try:
            either: set[asyncio.Future[Any]] = {task, self._told}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise Told
            return task.result()
        finally:
            if not task.done():
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)


def peer_of(spec: Run, endpoint: Endpoint, layout: Layout, work: Work, event: Event, fingerprint: str = "") -> Peer:
    options: dict[str, Any] = {"silent_s": seconds(spec.swarm.silent), "in_flight": spec.swarm.stages.in_flight}
    options |= {"due": saves_at(spec), "evaluates": partial(evaluates_at, spec)}
    peer = Peer(endpoint, layout, work, spec.steps, fingerprint=fingerprint, event=event, **options)
    event("start", step=0, stage=peer.stage, peers=sum(map(len, layout)), id=endpoint.id)
    return peer


async def take_steps(peer: Peer, end: End) -> None:
    """What is saved at a stop is of the last step that counted."""
    try:
        await end.unless_told(peer.run())
    except Told:
        peer.work.save(peer.at)
        said = f"stopped after step {peer.at} of {peer.steps}; started again, it goes on from there."
        raise end.error or Stopped(said) from None
    sent = {p[:8]: link.sent_bytes for p, link in peer.endpoint.links().items()}
    peer.event("finished", step=peer.at, digest=peer.work.digest(), sent=sent)


@contextlib.contextmanager
def journaled(folder: Path, steps: int) -> Iterator[Event]:
    """Events go to the journal of a peer, and what people wait for to its log."""
    began, one_at_a_time = time.monotonic(), threading.Lock()  # saves are told by the thread that computes

    def event(kind: str, **fields: Any) -> None:
        with one_at_a_time:
            journal.note(kind, at_s=round(time.monotonic() - began, 3), **fields)
        if kind == "step":
            print(f"step {fields['step']} of {steps}: loss {fields['loss']:.4f}", flush=True)
        elif kind == "eval":
            print(f"held-out loss after step {fields['step']}: {fields['loss']:.4f}", flush=True)
        elif "text" in fields:
            print(fields["text"], flush=True)

    with contextlib.closing(Journal(folder / "journal.jsonl")) as journal:
        yield event
